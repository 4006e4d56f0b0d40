"""The Trainer end to end on tiny models: what it writes, what it compiles, how it resumes, when it refuses."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from tiny_models import tiny_model

from jaxtune.models.adapters.adapter_files import save_adapter
from jaxtune.models.config import LayerSpec
from jaxtune.models.files import quant
from jaxtune.models.lora import freeze, get_peft_model, linears
from jaxtune.models.placement import partition
from jaxtune.train import shown_plan
from jaxtune.train.callbacks import TrainingStopped
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GuardConfig,
    MeshConfig,
    MetricsConfig,
    OptimConfig,
    ScheduleConfig,
)
from jaxtune.train.config.file import config_to_yaml, load_config
from jaxtune.train.data.tokens.documents import Document
from jaxtune.train.display import model_report, rows_report
from jaxtune.train.folder.checkpoint import Checkpointer, CheckpointError, saved_steps
from jaxtune.train.log.metrics import read_metrics
from jaxtune.train.objectives.loss import loss_sums
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import LENGTH, VOCAB, arrays, assert_same, dataset, documents, lora_model, make_config

ROOT = Path(__file__).resolve().parents[2]


# ---- one whole run, looked at from many sides

TRAIN, HELD_OUT = documents(34, seed=1), documents(8, seed=2)
STEPS = 24


def whole_run_config(output, **changes):
    settings = dict(
        steps=STEPS,
        data=DataConfig(train="rows that the test made", eval="held-out rows that the test made", length=LENGTH),
        micro_batches=2,
        optim=OptimConfig(learning_rate=3e-2),
        checkpoint=CheckpointConfig(every_steps=4, every_minutes=None, keep=2),
        evaluation=EvaluationConfig(every_steps=5, at_start=True),
        metrics=MetricsConfig(log_every=3),
    )
    return make_config(output, **(settings | changes))


@dataclasses.dataclass
class Run:
    given: nnx.Module
    before: dict[str, np.ndarray]
    trainer: Trainer
    trained: nnx.Module
    compiled: list[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    model = lora_model(layers=2, lora_dropout=0.1)
    before = arrays(model)
    compiled = []

    def listen(event, _, fun_name="", **others):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        config = whole_run_config(tmp_path_factory.mktemp("whole"))
        trainer = Trainer(model, None, config, dataset(TRAIN), dataset(HELD_OUT))
        return Run(model, before, trainer, trainer.train(), compiled)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.full
def test_one_compile_of_each_program_whatever_the_data(run):
    batches, held_out = run.trainer.batches, run.trainer.eval_batches
    assert len(batches.rows) % 4, "the last batch of an epoch must be a short one"
    assert len(held_out.rows) % 2 and held_out.steps_per_epoch > 1
    assert run.trainer.total_steps > batches.steps_per_epoch
    for name in ("accumulate", "update", "evaluate"):
        assert run.compiled.count(f"jit({name})") == 1, (name, run.compiled)


def test_the_loss_falls(run):
    losses = [line["loss"] for line in run.trainer.history if "loss" in line]
    assert len(losses) == STEPS
    assert abs(losses[0] - math.log(VOCAB)) < 1.0
    assert np.mean(losses[-6:]) < np.mean(losses[:6]) - 0.3
    held_out = [line["eval_loss"] for line in run.trainer.history if "eval_loss" in line]
    assert held_out[-1] < held_out[0] - 0.3


METRICS = {
    "step",
    "time",
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "targets",
    "skipped",
    "tokens_per_second",
    "real_tokens_per_second",
    "trained_tokens_per_second",
    "steps",
    "step_seconds",
    "data_wait_seconds",
    "peak_memory_bytes",
}


def test_metrics_lines(run):
    lines = read_metrics(run.trainer.output / "metrics.jsonl")
    training = [line for line in lines if "loss" in line]
    assert [line["step"] for line in training] == list(range(3, STEPS + 1, 3))
    for line in training:
        assert set(line) == METRICS
        assert line["tokens_per_second"] >= line["real_tokens_per_second"] > line["trained_tokens_per_second"] > 0
        assert line["grad_norm"] > 0 and line["skipped"] == 0 and line["learning_rate"] == pytest.approx(3e-2)
        assert line["steps"] == 3
        slots = line["tokens_per_second"] * line["steps"] * line["step_seconds"]
        assert slots == pytest.approx(3 * run.trainer.config.rows_per_step * LENGTH)
    assert training[-1]["epoch"] == pytest.approx(STEPS / run.trainer.batches.steps_per_epoch, abs=1e-4)
    held_out = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in held_out] == [0, 5, 10, 15, 20, STEPS]
    assert {line["eval_targets"] for line in held_out} == {sum(int(d.mask[1:].sum()) for d in HELD_OUT)}
    # The history holds every step, the file every third.
    assert [line["step"] for line in run.trainer.history if "loss" in line] == list(range(1, STEPS + 1))


def test_targets_are_counted_without_padding(run):
    counts = [line["targets"] for line in run.trainer.history if "loss" in line]
    assert sum(counts[: run.trainer.batches.steps_per_epoch]) == sum(int(d.mask[1:].sum()) for d in TRAIN)


def test_the_model_given_is_untouched_and_alive(run):
    after = arrays(run.given)  # would raise on a donated buffer
    assert after.keys() == run.before.keys()
    for name, value in run.before.items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)
    for (name, one), (_, other) in zip(linears(run.given), linears(run.trained), strict=True):
        assert one.weight.get_value() is other.weight.get_value(), f"{name}: frozen arrays are shared"
        assert (np.asarray(one.lora.b[...]) != np.asarray(other.lora.b[...])).any(), f"{name} did not train"
    assert np.isfinite(run.given(jnp.ones((1, 4), jnp.int32))).all()


def test_the_trained_model_has_the_loss_that_was_reported(run):
    batch = jax.tree.map(jnp.asarray, run.trainer.eval_data.rows.batch())
    loss, count, _ = loss_sums(run.trained, batch)
    assert float(loss / count) == pytest.approx(run.trainer.history[-1]["eval_loss"], rel=1e-6)
    assert run.trained.dtype == run.given.dtype


def test_what_the_output_folder_holds(run):
    names = {path.name for path in run.trainer.output.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "loss.png", "checkpoints", "state.json"}
    steps = sorted(p.name for p in (run.trainer.output / "checkpoints").iterdir() if p.name.startswith("step_"))
    assert steps == ["step_00000020", "step_00000024"]  # every four, the newest two


def test_what_is_recorded_is_the_adapter_that_trained(run, tmp_path):
    """The config given says nothing of an adapter; the model has one, with dropout."""
    save_adapter(run.trained, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    in_yaml = load_config(str(run.trainer.output / "config.yaml")).adapter
    in_checkpoint = json.loads(next(run.trainer.output.glob("checkpoints/step_*24/meta.json")).read_text())
    for recorded in (dataclasses.asdict(in_yaml), in_checkpoint["meta"]["config"]["adapter"]):
        for key in ("r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora", "modules_to_save", "rank_pattern"):
            assert recorded[key] == written[key], key
        assert sorted(recorded["target_modules"]) == written["target_modules"]


def test_evaluate_is_the_loss_of_the_model_as_it_is(run):
    config = whole_run_config(run.trainer.output)
    values = Trainer(run.given, None, config, dataset(TRAIN), dataset(HELD_OUT)).evaluate()
    assert values["eval_loss"] == run.trainer.history[0]["eval_loss"]
    with pytest.raises(ValueError, match="there are no evaluation rows: set data.eval or data.eval_rows"):
        Trainer(run.given, None, make_config(run.trainer.output), dataset(TRAIN)).evaluate()


# ---- resuming: refusals need no compile, because they come first


def again(run, model=None, train=None, **changes):
    """The same run once more, in the same folder."""
    config = whole_run_config(run.trainer.output, **changes)
    return Trainer(model or run.given, None, config, train or dataset(TRAIN), dataset(HELD_OUT))


def test_a_finished_run_is_complete(run, capsys):
    trained = again(run).train()
    assert_same(trained, run.trained)
    out = capsys.readouterr()
    assert f"resuming from step {STEPS} of {STEPS}" in out.out
    assert "not bit for bit" not in out.out and "changed" not in out.out
    assert "this run is complete" in out.out + out.err
    lines = read_metrics(run.trainer.output / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(3, STEPS + 1, 3))


def test_a_step_that_has_no_checkpoint_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="step_00000005"):
        again(run).train(from_step=5)
    with pytest.raises(ValueError, match="step_00000005"):
        Trainer(run.given, None, whole_run_config(tmp_path), dataset(TRAIN), dataset(HELD_OUT)).train(from_step=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(optim=OptimConfig(learning_rate=1e-3)), r"config\.optim\.learning_rate: saved 0\.03, now 0\.001"),
        (dict(optim=OptimConfig(name="sgd", learning_rate=3e-2)), r"config\.optim\.name: saved 'adamw', now 'sgd'"),
        (dict(steps=20), "steps = 20: the last checkpoint is of step 24; give it as many or more"),
        (dict(seed=1), r"config\.seed: saved 0, now 1"),
        (dict(precision="bf16"), r"config\.precision: saved 'fp32', now 'bf16'"),
        (
            dict(precision={"*": "fp32", "lm_head": "bf16"}),
            r"config\.precision\.lm_head: saved '\(absent\)', now 'bf16'",
        ),
        (dict(train=dataset(TRAIN[:-1])), r"data\.tokens_crc32: saved"),
        (dict(model=lora_model(layers=2, r=2)), r"trainable\..*lora\.a: saved \[\[4, 16\]"),
        (dict(checkpoint=CheckpointConfig(resume="never")), "holds checkpoints and checkpoint.resume is never"),
    ],
    ids=["learning rate", "optimizer", "steps", "seed", "precision", "map", "rows", "adapter", "never"],
)
def test_another_run_is_refused_with_the_difference(run, changes, message):
    before = (run.trainer.output / "config.yaml").read_text()
    with pytest.raises(ValueError, match=message):
        again(run, **changes).train()
    assert (run.trainer.output / "config.yaml").read_text() == before


@pytest.mark.full
@pytest.mark.parametrize("steps", [22, 26])
def test_a_run_of_constant_rate_takes_other_steps(run, tmp_path, steps):
    shutil.copytree(run.trainer.output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000024")
    other = Trainer(run.given, None, whole_run_config(tmp_path / "run", steps=steps), dataset(TRAIN), dataset(HELD_OUT))
    other.train()
    losses, before = (
        {line["step"]: line["loss"] for line in of if "loss" in line} for of in (other.history, run.trainer.history)
    )
    assert list(losses) == list(range(21, steps + 1))
    assert all(losses[step] == before[step] for step in losses.keys() & before.keys())
    assert saved_steps(tmp_path / "run" / "checkpoints")[-1] == steps


def test_harmless_changes_are_told(run, capsys):
    again(run, micro_batches=4, checkpoint=CheckpointConfig(every_steps=4, every_minutes=None, keep=3)).train()
    told = capsys.readouterr().out
    assert "not bit for bit the same run: numerics.micro_batches: saved 2, now 4" in told
    assert "changed: config.checkpoint.keep: saved 2, now 3" in told
    # Leaves the folder as it was for the others.
    (run.trainer.output / "config.yaml").write_text(config_to_yaml(run.trainer.config))


def test_the_folder_of_another_run_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    named = r"belongs to another run \(its config.yaml differs\), .*choose another folder, such as output=.*-2, or"
    with pytest.raises(ValueError, match=named):
        Trainer(lora_model(), None, make_config(tmp_path), dataset(TRAIN)).train()
    assert (tmp_path / "config.yaml").read_text() == "steps: 3\n"


def test_metrics_of_something_else_are_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ValueError, match="is of another run"):
        Trainer(lora_model(), None, make_config(tmp_path), dataset(TRAIN)).train()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'


# ---- resuming, bit for bit

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {root!r} + "/tests/models"]
from tests.train.test_trainer import resumable
from jaxtune.train.trainer import Trainer
from jaxtune.train.loop.saving import TrainingInterrupted
from jaxtune.train.signals import EXIT_SAVED

output, how = Path(sys.argv[1]), sys.argv[2]

class Stopped(Trainer):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.real, self.engine.load_step = self.engine.load_step, self.load_step

    def load_step(self, step):
        if how == "term" and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if how == "kill" and step == 8:
            while not (output / "checkpoints" / "step_00000006").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.real(step)

try:
    resumable(output, Stopped).train()
except TrainingInterrupted:
    sys.exit(EXIT_SAVED)
"""


def resumable(output, kind=Trainer):
    """Ten steps over more than one epoch, with dropout, in bf16."""
    config = make_config(
        output,
        steps=10,
        precision="bf16",
        deterministic=True,
        schedule=ScheduleConfig(name="cosine", warmup_steps=3),
        checkpoint=CheckpointConfig(every_steps=3, every_minutes=None),
    )
    return kind(lora_model(lora_dropout=0.2), None, config, dataset(TRAIN))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    trainer = resumable(tmp_path_factory.mktemp("straight"))
    return trainer, trainer.train()


@pytest.mark.parametrize(("how", "code"), [("term", 75), ("kill", -9)])
def test_a_stopped_run_goes_on_bit_for_bit(straight, tmp_path, how, code, capsys):
    trainer, trained = straight
    assert trainer.total_steps > trainer.batches.steps_per_epoch
    assert trainer.program.max_documents is None  # a promise would let cuDNN's attention in
    script = SCRIPT.format(root=str(ROOT))
    # Compiled with the passes that this process has: programs of others need not give the same bits.
    few_passes = "1" if jax.config.values["jax_disable_most_optimizations"] else "0"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), how],
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": few_passes},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        latest = checkpointer.latest()
    assert latest in ((4, 5, 6) if how == "term" else (6,))
    resumed = resumable(tmp_path)
    assert_same(resumed.train(), trained)
    out = capsys.readouterr().out
    assert f"resuming from step {latest} of 10" in out and "not bit for bit" not in out
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 11))
    for key in ("loss", "grad_norm", "learning_rate", "targets"):
        assert [line[key] for line in lines] == [line[key] for line in trainer.history], key


@pytest.mark.full
def test_a_run_that_died_before_its_first_checkpoint_begins_anew(straight, tmp_path):
    fresh = resumable(tmp_path)
    (tmp_path / "config.yaml").write_text(config_to_yaml(fresh.config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "lo')
    assert_same(fresh.train(), straight[1])
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 11))


# ---- other trainable sets, other devices, other precisions


def test_full_fine_tuning_is_the_same_step(tmp_path):
    model = tiny_model("bfloat16", layers=(LayerSpec(),), tie_embeddings=True)
    model.base_fingerprint = "0" * 64
    before = arrays(model)
    config = make_config(tmp_path, precision="bf16", micro_batches=2, steps=8, optim=OptimConfig(learning_rate=1e-2))
    trainer = Trainer(model, None, config, dataset(TRAIN))
    trained = trainer.train()
    assert trainer.history[-1]["loss"] < trainer.history[0]["loss"]
    for name, value in arrays(trained).items():
        assert value.dtype == before[name].dtype, name  # as it came in
        assert (value.astype(np.float32) != before[name].astype(np.float32)).any(), f"{name} did not train"
        np.testing.assert_array_equal(before[name], arrays(model)[name])
    assert trained.head is None
    # Other weights are another base: adapters of the old one do not belong to it.
    assert trained.base_fingerprint is None and model.base_fingerprint == "0" * 64


@pytest.mark.parametrize("words", [{}, {"lm_head": "fp32", "norms": "fp32", "layers.0.*.v_proj": "fp32"}])
def test_fp16_scales_the_loss_and_trains(tmp_path, words):
    config = make_config(tmp_path, precision={**words, "*": "fp16"}, steps=12)
    trainer = Trainer(lora_model(), None, config, dataset(TRAIN))
    trainer.train()
    lines = trainer.history
    assert all(line["loss_scale"] >= 1 for line in lines)
    applied = [line for line in lines if math.isfinite(line["grad_norm"])]
    assert len(applied) == 12 - lines[-1]["skipped"] >= 6
    assert applied[-1]["loss"] < applied[0]["loss"]


@pytest.mark.full
def test_a_model_trained_on_two_devices_works_with_what_the_caller_holds(tmp_path):
    model = lora_model()
    trained = Trainer(model, None, make_config(tmp_path, mesh=MeshConfig(data=2), steps=1), dataset(TRAIN)).train()
    tokens = jnp.ones((1, 4), jnp.int32)
    assert np.isfinite(trained(tokens)).all() and np.isfinite(model(tokens)).all()


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match=r"mesh.data = 64: there are 8 cpu devices"):
        partition.make_mesh(64)


# ---- guards


@pytest.mark.full
def test_the_rate_of_a_run_that_is_made_longer_is_said_as_it_is_taken(tmp_path, capsys):
    """Updates that were skipped, here because the first loss scales of fp16 are too large, move no schedule on."""

    def train(steps):
        settings = dict(precision="fp16", schedule=ScheduleConfig("linear", warmup_steps=1), steps=steps)
        saves = CheckpointConfig(every_steps=6, every_minutes=None)
        trainer = Trainer(lora_model(), None, make_config(tmp_path, checkpoint=saves, **settings), dataset(TRAIN))
        trainer.train()
        return trainer.history

    assert 0 < train(6)[-1]["skipped"] < 6
    capsys.readouterr()
    rate = next(line["learning_rate"] for line in train(12) if line["step"] == 7)
    said = re.search(r"schedule of 12 steps, and is (\S+) in step 7", " ".join(capsys.readouterr().out.split()))
    assert said[1] == f"{rate:.3g}"


def test_nothing_to_train(tmp_path):
    with pytest.raises(ValueError, match="the model has no trainable tensor: add adapters"):
        Trainer(freeze(tiny_model()), None, make_config(tmp_path), dataset(TRAIN))


def test_a_zero_gradient_stops_at_the_first_step(tmp_path):
    model = lora_model()
    for _, linear in linears(model):
        linear.lora.a.set_value(jnp.zeros_like(linear.lora.a[...]))  # with B at zero, nothing can move
    config = make_config(tmp_path, checkpoint=CheckpointConfig(every_steps=1, every_minutes=None))
    with pytest.raises(TrainingStopped, match=r"step 1: the gradient norm is exactly zero, .*layers\.0\.mixer"):
        Trainer(model, None, config, dataset(TRAIN)).train()
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        assert checkpointer.steps() == []


@pytest.mark.full
def test_adapters_without_a_gradient_are_named_after_the_first_steps(tmp_path):
    def idle(guards, folder):
        model = lora_model()
        _, linear = list(linears(model))[1]
        linear.lora.a.set_value(jnp.zeros_like(linear.lora.a[...]))  # with its B at zero, this adapter cannot move
        config = make_config(tmp_path / folder, steps=4, guards=guards)
        return Trainer(model, None, config, dataset(TRAIN))

    trainer = idle(GuardConfig(), "stops")
    with pytest.raises(TrainingStopped, match=r"step 3: the gradient of 1 adapters was .* zero in the first 3") as stop:
        trainer.train()
    assert "do not train: layers.0.mixer.k_proj. Leave" in str(stop.value)
    trainer = idle(GuardConfig(adapters_without_gradient=True), "goes on")
    trainer.train()
    assert len(trainer.history) == 4


def test_steps_that_are_not_finite_stop_the_run_and_are_never_saved(tmp_path, capsys):
    config = make_config(
        tmp_path,
        steps=30,
        max_grad_norm=None,
        optim=OptimConfig(name="sgd", learning_rate=1e25, momentum=0.0),
        guards=GuardConfig(max_nonfinite_in_row=3),
        checkpoint=CheckpointConfig(every_steps=1, every_minutes=None),
    )
    trainer = Trainer(lora_model(), None, config, dataset(TRAIN))
    with pytest.raises(
        TrainingStopped, match=r"3 steps in a row were not finite \(guards.max_nonfinite_in_row\)"
    ) as stop:
        trainer.train()
    bad = [line for line in trainer.history if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]))]
    assert [line["skipped"] for line in bad] == [1, 2, 3]
    first = bad[0]["step"]
    assert first > 1, "the first step must be a good one"
    for step in (first, first + 1, first + 2):
        assert f"step {step}: loss" in str(stop.value)
    out = capsys.readouterr()
    assert f"step {first}: loss" in out.out + out.err and "update skipped; rows document" in out.out + out.err
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        _, state, _ = checkpointer.restore()
    for name, value in arrays(state).items():
        assert np.isfinite(np.asarray(value, np.float64)).all(), name
    # The file is JSON to the last line.
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["skipped"] == 3 and isinstance(lines[-1]["grad_norm"], str)


def test_all_labels_masked(tmp_path):
    masked = [Document(d.tokens, np.zeros_like(d.mask)) for d in TRAIN]
    with pytest.raises(ValueError, match="no document has a trained token within its first data.length=16 tokens"):
        Trainer(lora_model(), None, make_config(tmp_path), dataset(masked))


ROWS = [{"prompt": "Who are you?", "completion": f" I am a bot number {i}."} for i in range(12)]


def test_a_token_beyond_the_vocabulary(tmp_path):
    tokenizer = make_tokenizer()
    config = make_config(tmp_path, data=DataConfig(train="rows", length=64, num_workers=1))
    with pytest.raises(ValueError, match=r"token id \d+ \('.*'\) is beyond the model's vocabulary of 48"):
        Trainer(lora_model(), tokenizer, config, ROWS)
    prepared = dataset(TRAIN)
    prepared.summary.max_token = VOCAB
    with pytest.raises(ValueError, match="token id 48 is beyond the model's vocabulary of 48"):
        Trainer(lora_model(), None, make_config(tmp_path), prepared)


def test_rows_longer_than_the_model(tmp_path):
    """Documents must fit the model's positions; packed rows may be longer, since positions restart in each document."""
    config = make_config(tmp_path, data=DataConfig(train="rows", length=256))
    Trainer(lora_model(), None, config, dataset(TRAIN))
    long = dataset([np.zeros(200, np.int32)])
    message = "data.length = 256: the longest document has 200 tokens, and the model was made for at most 128 positions"
    with pytest.raises(ValueError, match=message):
        Trainer(lora_model(), None, config, long)


# ---- reports


def test_the_reports_of_check_and_plan(tmp_path):
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=400, layers=(LayerSpec(),) * 2)
    model = get_peft_model(model, r=2, target_modules=["q_proj", "up_proj"], rank_pattern={r"layers\.1.*up_proj": 3})
    config = make_config(tmp_path / "out", data=DataConfig(train="rows", length=64, num_workers=1))
    trainer = Trainer(model, tokenizer, config, ROWS)
    console = Console(file=io.StringIO(), width=200, soft_wrap=True)
    rows_report.check(model, trainer.data_summary(), trainer.batches, trainer.tokenizer, console)
    text = console.file.getvalue()
    assert re.search("\u27e6 ?I am a bot", text)  # no colours: brackets
    assert "what is trained is between \u27e6 and \u27e7" in text
    trainable, total = quant.parameter_counts(model)
    assert trainable == 2 * 2 * (16 + 16) + 2 * (16 + 24) + 3 * (16 + 24)
    assert f"Trainable: {trainable:,} of {total:,} parameters" in text
    for words in (
        "mixer.q_proj.lora.a",
        "2 x 16",
        "0-1",
        "mlp.up_proj.lora.b",
        "24 x 3",
        "I am a bot",
        "12 documents",
    ):
        assert words in text, words
    figures = shown_plan.show_memory(trainer, console)
    assert figures["predicted"] > 0 and figures["compiled"] > 0 and "limit" not in figures
    assert "plan: keep (nothing is computed twice); one micro-batch of 4 x 64 tokens" in console.file.getvalue()
    assert f"the compiler says {figures['compiled']:.3f} GB" in console.file.getvalue()
    assert not (tmp_path / "out").exists()  # both only look


@pytest.mark.parametrize(("numbers", "text"), [([0, 1, 2, 3, 5, 7, 8], "0-3, 5, 7-8"), ([4], "4"), ([2, 1], "1-2")])
def test_layer_ranges(numbers, text):
    assert model_report._ranges(numbers) == text


def test_checkpoint_errors_are_value_errors():
    """The command prints ValueErrors as one line."""
    assert issubclass(CheckpointError, ValueError) and issubclass(TrainingStopped, ValueError)


@pytest.mark.full
def test_a_model_that_nobody_keeps_is_let_go_and_trained_as_another(tmp_path):
    """The adapter's start values are freed once they are copied; the base's arrays are the run's still."""
    trained, planned = [], []
    for keeps_model in (True, False):
        model = lora_model(use_dora=True)
        starts = [weakref.ref(matrix.lora.a[...]) for _, matrix in linears(model)]
        config = make_config(tmp_path / str(keeps_model), steps=2)
        trainer = Trainer(model, None, config, dataset(documents(12)), keeps_model=keeps_model)
        del model
        trained.append(trainer.train())
        gc.collect()
        assert {start() is not None for start in starts} == {keeps_model}
        planned.append(trainer.planner.cost.fixed_bytes(1))
    assert_same(*trained)
    adapter = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(trained[0], nnx.Param)))
    assert planned[0] - planned[1] == adapter
