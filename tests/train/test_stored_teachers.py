"""Distillation from a teacher's stored log-probabilities: computed before the run, or read from a file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtune import cli
from jaxtune.models.files.published import PUBLISHED
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
)
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.tokens.teacher_files import open_file
from jaxtune.train.data.tokens.teacher_values import TEACHER_IDS, TEACHER_LOG_PROBS, TeacherValues
from jaxtune.train.folder.checkpoint import CheckpointError
from jaxtune.train.objectives.distillation import Distill
from jaxtune.train.objectives.teachers import open_teacher, teacher_shapes, with_teacher
from jaxtune.train.planning.layer_costs import nbytes
from jaxtune.train.references import references, stored_teachers
from jaxtune.train.spec.loading import loading
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.test_distillation import ROWS, Cut, folder_of, of_metric, same_bits, student_model, teacher_model
from tests.train.tiny_runs import LENGTH, VOCAB, dataset, documents, make_config

TRAIN, HELD_OUT = documents(32, longest=9), documents(8, seed=1, longest=9)


def trainer_of(folder, attached=None, rows=None, data=None, mesh=None, **options) -> Trainer:
    """Six steps of four packed rows in two micro-batches. options: of the objective."""
    named = {} if "teacher_logprobs" in options else dict(teacher="given")
    config = make_config(
        folder,
        steps=6,
        micro_batches=2,
        optim=OptimConfig(learning_rate=2e-2, weight_decay=0.0),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None),
        data=DataConfig(train="t", length=LENGTH, eval="held out", cache_dir=str(folder / "cache"), **(data or {})),
        mesh=mesh,
        objective=ObjectiveConfig("distill", **(dict(beta=0.5, on_policy=0.0) | named | options)),
    )
    model = student_model()
    if attached is not None or named:
        model = with_teacher(model, attached or known_teacher())
    return Trainer(model, None, config, rows or dataset(TRAIN), dataset(HELD_OUT))


def known_teacher(digest: str = "a"):
    teacher = teacher_model()
    teacher.base_digest = digest * 64  # as if it was loaded, so that its log-probabilities are stored on disk
    return teacher


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = trainer_of(tmp_path_factory.mktemp("stored"), teacher_top_k=VOCAB)
    return trainer, trainer.train()


@pytest.mark.full
def test_with_the_whole_vocabulary_it_is_the_run_with_the_teacher_beside(run, tmp_path):
    whole = trainer_of(tmp_path)
    trained = whole.train()
    stored, result = run
    assert stored.model.prepared.teacher is None and stored.spec.objective.reference_runs == 0
    for name in ("loss", "eval_loss", "entropy", "grad_norm"):
        np.testing.assert_allclose(of_metric(stored, name), of_metric(whole, name), rtol=2e-5)
    for one, other in zip(*(jax.tree.leaves(nnx.state(each)) for each in (result, trained)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-5)
    assert "of which 48 log-probabilities a token are stored before the run" in stored.data_summary()


@pytest.mark.full
def test_an_interrupted_run_continues_to_the_same_bits_from_the_stored_file(run, tmp_path, capsys):
    cut = trainer_of(tmp_path, teacher_top_k=VOCAB)
    cut.callbacks = (Cut(),)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    assert "one pass over" in "".join(capsys.readouterr())
    files = sorted((tmp_path / "cache").glob("teacher_*.npy"))
    assert len(files) == 2  # of the rows to train on, and of the others
    again = trainer_of(tmp_path, teacher_top_k=VOCAB)
    same_bits(again.train(), run[1])
    assert not again.stored.phases(again.engine)  # there was no pass
    shown = "".join(capsys.readouterr())
    assert "one pass over" not in shown and str(files[0]) in shown
    with pytest.raises(CheckpointError, match="teacher_digest"):
        trainer_of(tmp_path, known_teacher("b"), teacher_top_k=VOCAB).train()
    capsys.readouterr()
    damaged = bytearray(files[0].read_bytes())
    damaged[-40] ^= 1
    files[0].write_bytes(damaged)
    again = trainer_of(tmp_path, teacher_top_k=VOCAB)
    assert [phase.name for phase in again.stored.phases(again.engine)] == ["teacher"]
    again.stored.fill((again.train_data, again.eval_data), again.engine)
    assert again.stored.phases(again.engine)
    shown = "".join(capsys.readouterr())
    assert f"{files[0]} is damaged" in shown.replace("\n", "") and shown.count("one pass over") == 1


@pytest.mark.full
def test_the_plan_says_what_the_stored_values_take_of_the_disk(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, teacher_top_k=6)
    folder, size = trainer.stored.unwritten((trainer.train_data, trainer.eval_data))
    usage = SimpleNamespace(total=10**12, used=0, free=2 * size)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert folder == tmp_path / "cache"
    assert any(f"log-probabilities of the teacher {size / 1e9:.2f} GB" in line for line in trainer.disk_notes())
    trainer.stored.fill((trainer.train_data, trainer.eval_data), trainer.engine)
    written = [path.stat().st_size for path in folder.glob("teacher_*.npy")]
    assert len(written) == 2 and size <= sum(written) < size + 600  # with two headers and checksums
    assert trainer.stored.unwritten((trainer.train_data, trainer.eval_data)) is None
    assert not any("of the teacher" in line for line in trainer.disk_notes())


def test_other_runs_do_not_take_a_file_that_is_being_written_for_a_leftover(tmp_path):
    """Runs that share a token cache clean it as they begin, at any moment of another's."""

    def one_run(number: int) -> list[int]:
        found = []
        for round in range(20):
            values = TeacherValues(dataset(TRAIN).documents, LENGTH, 2)
            path = tmp_path / f"teacher_{number}_{round}.npy"
            with stored_teachers._stored(path, values) as array:
                array["ids"] = number
            stored = references.read_values(path, (values.total,), TeacherValues.entry(2), print)
            found.append(np.unique(stored["ids"]).tolist())
        return found

    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert list(pool.map(one_run, range(4))) == [[[number]] * 20 for number in range(4)]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.full
def test_two_devices_lead_where_one_leads(run, tmp_path):
    trainer = trainer_of(tmp_path, mesh=MeshConfig(data=2), teacher_top_k=VOCAB)
    trainer.train()
    np.testing.assert_allclose(of_metric(trainer, "loss"), of_metric(run[0], "loss"), rtol=1e-4)


@pytest.mark.full
def test_rows_packed_for_each_step_have_their_values_too(tmp_path):
    data = dict(packing="step")
    rows = dataset(documents(24, longest=24), packing="step")  # some are longer than data.length
    stored, whole = (
        trainer_of(tmp_path / name, rows=rows, data=data, **options)
        for name, options in (("stored", dict(teacher_top_k=VOCAB)), ("whole", {}))
    )
    for trainer in (stored, whole):
        trainer.train()
    for name in ("loss", "eval_loss"):
        np.testing.assert_allclose(of_metric(stored, name), of_metric(whole, name), rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("name", ["a teacher", "base"])
def test_the_command_loads_the_teacher_for_the_pass_alone(name, tmp_path):
    tokenizer = make_tokenizer()
    models = [make(vocab_size=len(tokenizer)) for make in (student_model, teacher_model)]
    student, teacher = (folder_of(model, tmp_path / each) for model, each in zip(models, ("s", "t"), strict=True))
    objective = ObjectiveConfig(
        "distill", teacher="base" if name == "base" else teacher, teacher_top_k=5, on_policy=0.0, temperature=1.5
    )
    config = make_config(
        tmp_path / "out",
        model=ModelConfig(path=student),
        adapter=AdapterConfig(r=2),
        data=DataConfig(train="t", length=64, template="chatml", cache_dir=str(tmp_path / "cache")),
        objective=objective,
    )
    with loading(config) as (weights, found, model):
        trainer = Trainer(model, found, config, ROWS, weights=weights)
        trainer.stored.fill((trainer.train_data,), trainer.engine)
        assert trainer.model.prepared.teacher is None
    values, document = trainer.train_data.teacher, trainer.train_data.documents[1]
    logits = models[0 if name == "base" else 1](document.tokens[None])[0] / 1.5
    logs, ids = jax.lax.top_k(jax.nn.log_softmax(logits), 5)
    places = np.flatnonzero(document.mask[1:])
    np.testing.assert_array_equal(values.stored[values.of(1)]["ids"], ids[places])
    np.testing.assert_allclose(values.stored[values.of(1)]["log_probs"], logs[places], rtol=1e-4, atol=1e-5)


def test_a_teacher_of_another_vocabulary_is_refused_before_its_pass(tmp_path):
    tokenizer = make_tokenizer()
    student, teacher = student_model(vocab_size=len(tokenizer)), teacher_model(vocab_size=len(tokenizer) + 8)
    objective = ObjectiveConfig("distill", teacher=folder_of(teacher, tmp_path / "t"), teacher_top_k=5, on_policy=0.0)
    data = DataConfig(train="t", length=64, template="chatml")
    trainer = Trainer(student, tokenizer, make_config(tmp_path, data=data, objective=objective), ROWS)
    with pytest.raises(ConfigError, match="objective.teacher = .*: its vocabulary has .* entries and the student's"):
        trainer.stored.fill((trainer.train_data,), trainer.engine)


# ---- memory


def of_command(folder, monkeypatch, budget_bytes: float):
    """A trainer that only evaluates, whose teacher, larger than the student, is in a folder and must not be loaded;
    bytes of the student; and of the teacher."""
    tokenizer = make_tokenizer()
    teacher = teacher_model(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=512)
    named = dict(teacher=folder_of(teacher, folder / "t"), teacher_top_k=5, on_policy=0.0)
    config = make_config(
        folder,
        data=DataConfig(train="t", length=64, template="chatml", cache_dir=str(folder / "cache")),
        objective=ObjectiveConfig("distill", **named),
        memory=within(budget_bytes),
    )
    monkeypatch.setattr(stored_teachers, "load_teacher", lambda *arguments, **options: pytest.fail("it was loaded"))
    student = student_model(vocab_size=len(tokenizer))
    return Trainer(student, tokenizer, config, ROWS, trains=False), *(
        nbytes(nnx.state(each)) for each in (student, teacher)
    )


def within(budget_bytes: float) -> MemoryConfig:
    return MemoryConfig(budget_gb=budget_bytes / 1e9)


@pytest.mark.full
def test_a_teacher_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    trainer, own, teacher = of_command(tmp_path, monkeypatch, 1e6)
    assert teacher > 1e6
    with pytest.raises(ConfigError, match="its weights of 0.00 GB and the student's.*objective.teacher_logprobs, a"):
        trainer.stored.fill((trainer.train_data,), trainer.engine)
    [phase] = trainer.stored.phases(trainer.engine)
    assert phase.name == "teacher" and phase.device_bytes > own + teacher


def test_the_table_of_phases_has_the_pass_and_what_would_make_it_fit(tmp_path, monkeypatch):
    trainer, own, teacher = of_command(tmp_path, monkeypatch, 1e9)
    planned = trainer.stored._pass(trainer.engine)
    assert planned.warnings() == []
    # While a tensor is loaded it exists twice more, which is all of this small teacher.
    spec = dataclasses.replace(planned.spec, memory=within(own + 2.6 * teacher))
    tight = dataclasses.replace(planned, spec=spec)
    [line] = tight.warnings()
    assert (
        line.startswith("warning: teacher will need ")
        and "GB of device memory: objective.teacher_load_in=nf4, " in line
    )
    attached = dataclasses.replace(planned, attached_teacher=teacher_model())
    assert "load_in" not in attached.phase.remedy  # it is there already


@pytest.mark.full
def test_a_plan_of_another_device_has_the_pass_and_what_would_make_it_fit(tmp_path, capsys):
    """From shapes alone: a teacher of 29 GB in 16 bits beside a small student."""
    shape = PUBLISHED["meta-llama/Llama-3.1-8B"]
    for name, changes in (("s", dict(num_hidden_layers=1)), ("t", dict(num_hidden_layers=8, intermediate_size=143360))):
        (tmp_path / f"{name}.json").write_text(json.dumps(shape | changes))
    asked = [f"model.path={tmp_path}/s.json", f"objective.teacher={tmp_path}/t.json", "objective.teacher_top_k=8"]
    asked += ["objective.name=distill", "objective.on_policy=0", "plan.device=RTX 4090"]
    assert cli.main(["train", "qlora-8b", "--plan", *asked]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "memory of each phase: teacher 3" in shown and "warning: teacher will need 3" in shown
    assert "GB of device memory: objective.teacher_load_in=nf4, or objective.teacher_logprobs, a file of" in shown


# ---- rows


def filled(rows, k: int, limit: int | None):
    """The rows with values that tell the document's token that they belong to: id = token, log-probability = -place."""
    values = TeacherValues(rows.documents, limit, k)
    stored = np.zeros(values.total, TeacherValues.entry(k))
    for index in range(len(rows.documents)):
        document = rows.documents[index]
        places = np.flatnonzero(document.mask[1:limit]) + 1
        stored["ids"][values.of(index)] = document.tokens[places][:, None]
        stored["log_probs"][values.of(index)] = -places[:, None]
    values.stored = stored
    return dataclasses.replace(rows, teacher=values)


@pytest.mark.parametrize("overflow, packing", [("truncate", True), ("split", True), ("truncate", False)])
def test_each_trained_token_has_its_own_values(overflow, packing):
    made = documents(24, seed=3, longest=30)  # longer than a row
    plain = dataclasses.replace(dataset(made, length=12, packing=packing), overflow=overflow)
    rows = filled(plain, 3, 12 if overflow == "truncate" else None).rows
    batch = rows.empty(len(rows))
    for row in range(len(rows)):
        rows.fill(batch, row, row)
    there = batch.weights > 0
    assert there.sum() == rows.report.trained_tokens
    np.testing.assert_array_equal(batch.extra[TEACHER_IDS][there], batch.targets[there][:, None].repeat(3, 1))
    assert (batch.extra[TEACHER_IDS][~there] == -1).all()
    if overflow == "truncate":
        places = batch.positions[there] + 1
        np.testing.assert_array_equal(-batch.extra[TEACHER_LOG_PROBS][there][:, 0], places)
    again = np.zeros_like(rows.values.stored)
    for row in range(len(rows)):  # what the pass of a teacher writes
        rows.take(row, batch.extra[TEACHER_IDS][row], batch.extra[TEACHER_LOG_PROBS][row], again)
    used = again["ids"][:, 0] != 0
    np.testing.assert_array_equal(again[used], rows.values.stored[used])


# ---- files


def file_of(path, teacher, made, k: int = 6, form: str = "lists"):
    """Writes the k largest log-probabilities of the teacher at each token of the documents `made`."""
    lines = []
    for document in made:
        logs = np.asarray(jax.nn.log_softmax(teacher(document.tokens[None])[0]))[:-1]
        ids = np.argsort(-logs, -1)[:, :k]
        values = np.take_along_axis(logs, ids, -1)
        line: dict[str, object] = dict(input_ids=document.tokens.tolist())
        if form == "lists":
            line |= dict(top_ids=[None, *ids.tolist()], top_logprobs=[None, *values.tolist()])
        else:
            line["prompt_logprobs"] = [
                None,
                *(
                    {str(token): {"logprob": float(value), "rank": 1} for token, value in zip(*both, strict=True)}
                    for both in zip(ids.tolist(), values.tolist(), strict=True)
                ),
            ]
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    return str(path)


@pytest.mark.full
@pytest.mark.parametrize("form", ["lists", "vLLM"])
def test_a_file_has_what_the_pass_of_the_teacher_has(form, tmp_path):
    path = file_of(tmp_path / "t.jsonl", teacher_model(), [*TRAIN, *HELD_OUT], form=form)
    computed, read = trainer_of(tmp_path / "a", teacher_top_k=6), trainer_of(tmp_path / "b", teacher_logprobs=path)
    for trainer in (computed, read):
        trainer.stored.fill((trainer.train_data, trainer.eval_data), trainer.engine)
    for one, other in ((computed.train_data, read.train_data), (computed.eval_data, read.eval_data)):
        own, others = one.teacher.stored, other.teacher.stored
        np.testing.assert_array_equal(own["ids"], others["ids"])
        np.testing.assert_allclose(own["log_probs"], others["log_probs"], rtol=1e-5, atol=1e-5)
    assert "up to 6 log-probabilities a token from" in read.data_summary()


def changed(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def first(lines):
    """(a row, the place of its last token, which may be trained on) of the first row with trained tokens."""
    by_tokens = {tuple(document.tokens.tolist()): document.mask for document in TRAIN}
    line = next(line for line in lines if by_tokens.get(tuple(line["input_ids"]), np.zeros(2))[1:].any())
    return line, int(np.flatnonzero(by_tokens[tuple(line["input_ids"])][1:])[-1]) + 1


def set_at(name, make):
    def change(lines):
        line, place = first(lines)
        line[name][place] = make(line[name][place])

    return change


@pytest.mark.full
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda lines: lines.pop(), "lacks 1 of .* documents of data.train, first document 0, whose token ids begin"),
        (lambda lines: [line["input_ids"].reverse() for line in lines], "of other rows, or of another tokenizer"),
        (lambda lines: [line.pop("input_ids") for line in lines], "it has no input_ids, but top_ids, top_logprobs"),
        (lambda lines: lines[0]["top_ids"].pop(), "top_ids must be a list with an entry for each of the"),
        (lambda lines: lines[0]["input_ids"].__setitem__(0, [3]), "jsonl:1: input_ids must be a list of token ids"),
        (
            lambda lines: lines[0]["top_ids"].__setitem__(0, 7),
            "jsonl:1: top_ids: the entry of a token is 7, and must be",
        ),
        (lambda lines: [line.update(top_ids=[None] * len(line["input_ids"])) for line in lines], "none of its 40 rows"),
        (set_at("top_ids", lambda ids: None), "is trained on, and has no log-probabilities"),
        (set_at("top_ids", lambda ids: [VOCAB, *ids[1:]]), "a token id beyond the model's vocabulary of 48"),
        (set_at("top_ids", lambda ids: [ids[1], *ids[1:]]), "has a token id twice"),
        (set_at("top_logprobs", lambda logs: [1.5, *logs[1:]]), "above 0: logits are not log-probabilities"),
        (set_at("top_logprobs", lambda logs: [-0.1] * len(logs)), "add up to more than 1"),
        (set_at("top_logprobs", lambda logs: logs[1:]), "there are 6 token ids and 5 log-probabilities"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_words(change, words, tmp_path):
    path = tmp_path / "t.jsonl"
    file_of(path, teacher_model(), [*TRAIN, *HELD_OUT])
    changed(path, change)
    with pytest.raises(ConfigError, match=f"objective.teacher_logprobs.*{words}"):
        trainer = trainer_of(tmp_path / "run", teacher_logprobs=str(path))
        trainer.stored.fill((trainer.train_data, trainer.eval_data), trainer.engine)
    assert not list((tmp_path / "run/cache").glob("*.tmp"))


def test_the_id_of_no_token_has_no_log_probability(tmp_path):
    path = tmp_path / "t.jsonl"
    file_of(path, teacher_model(), TRAIN[:3], k=2)
    changed(
        path,
        lambda lines: [
            line["top_ids"].__setitem__(i, [-1, ids[1]])
            for line in lines
            for i, ids in enumerate(line["top_ids"])
            if ids
        ],
    )
    values = TeacherValues(dataset(TRAIN[:3]).documents, LENGTH, 2)
    into = np.zeros(values.total, TeacherValues.entry(2))
    open_file(str(path), print).read(values, VOCAB, into)
    assert (into["ids"][:, 0] == -1).all() and not into["log_probs"][:, 0].any() and into["log_probs"][:, 1].all()


def test_files_of_parquet_are_read(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t.jsonl"
    file_of(path, teacher_model(), TRAIN[:3], k=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    values = TeacherValues(dataset(TRAIN[:3]).documents, LENGTH, 2)
    found = []
    for name in ("t.jsonl", "t.parquet"):
        file, into = open_file(str(tmp_path / name), print), np.zeros(values.total, TeacherValues.entry(2))
        file.require_all(values, "data.train")
        file.read(values, VOCAB, into)
        found.append(into)
    np.testing.assert_array_equal(*found)


# ---- settings


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(teacher="t", teacher_top_k=8), "objective.on_policy = 1.0: the teacher's log-probabilities are stored"),
        (dict(teacher_logprobs="f", on_policy=0.5), "objective.on_policy = 0.5"),
        (dict(teacher_logprobs="f", teacher="t", on_policy=0.0), "objective.teacher = 't'"),
        (dict(teacher_logprobs="f", teacher_top_k=3, on_policy=0.0), "objective.teacher_top_k = 3"),
        (dict(teacher="t", teacher_top_k=0, on_policy=0.0), "objective.teacher_top_k = 0"),
        (dict(teacher_top_k=8, on_policy=0.0), "objective.teacher = None"),
    ],
)
def test_settings_that_cannot_be_are_named(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        ObjectiveConfig("distill", **options)


def test_what_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="objective.teacher_top_k = 49: must be from 1 to 48"):
        trainer_of(tmp_path, teacher_top_k=VOCAB + 1)
    with pytest.raises(ConfigError, match="no such data file"):
        trainer_of(tmp_path, teacher_logprobs=str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match="objective.teacher_top_k: needs all rows before the run"):
        trainer_of(tmp_path, rows=[(dataset(TRAIN), 1.0), (dataset(HELD_OUT), 1.0)], teacher_top_k=4)
    with pytest.raises(ValueError, match="on_policy = 1.0"):
        Distill(teacher_top_k=4)


def test_the_teacher_is_neither_loaded_beside_the_student_nor_planned(tmp_path):
    objective = ObjectiveConfig("distill", teacher="no such folder", teacher_top_k=4, on_policy=0.0)
    assert open_teacher(objective, "bfloat16") is None and teacher_shapes(objective, "bfloat16") is None
