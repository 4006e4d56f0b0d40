"""The table maker refuses records that prove nothing; what the README and docs/measured.md show is what is stored."""

import json
import math
import os
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIGS

from benchmarks import __main__ as command
from benchmarks import cases
from benchmarks.processes import step_arguments
from benchmarks.random_model import in_one_piece, random_model
from benchmarks.record import honest
from benchmarks.shapes import SHAPES
from benchmarks.table import Rejected, load, rows_of, startup_table
from benchmarks.train import budgets, cards, compile_ahead, files, memory, mesh, qat_quality, startup, step
from benchmarks.waits import Part
from jaxtune.models.files.quant import quantize
from jaxtune.models.hf import model_from_config, save_pretrained
from jaxtune.models.placement import partition
from jaxtune.train.config.file import load_config
from tests import patience

ROOT = Path(__file__).resolve().parents[1]
GOOD = {
    "benchmark": "train/step",
    "vocab_size": 1000,
    "first_loss": math.log(1000) + 0.5,
    "smallest_grad_norm_by_step_2": 1e-9,
}


def test_a_good_record_is_taken():
    assert honest(GOOD) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first_loss": 1.0}, "not near ln V"),
        ({"first_loss": math.nan}, "not near ln V"),
        ({"smallest_grad_norm_by_step_2": 0.0}, "no gradient"),
        ({"smallest_grad_norm_by_step_2": math.nan}, "no gradient"),
    ],
)
def test_a_record_that_proves_nothing_is_rejected(tmp_path, change, words):
    changed = GOOD | change
    assert words in honest(changed)
    (tmp_path / "steps.json").write_text(json.dumps({"8b": changed}))
    with pytest.raises(Rejected, match=words):
        load(tmp_path)


@pytest.mark.parametrize("key", ["first_loss", "smallest_grad_norm_by_step_2", "vocab_size"])
def test_a_record_without_its_proof_is_rejected(key):
    assert honest({k: v for k, v in GOOD.items() if k != key}) == f"{key} is missing"


def test_readme_and_tables_show_the_stored_records():
    done = subprocess.run(
        [sys.executable, "benchmarks/table.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


SMALL = SHAPES["qwen3-32b"] | dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_a_random_model_made_by_layers_is_the_one_made_at_once(load_in, on_host):
    wanted = model_from_config(SMALL, jax.random.key(3), "bfloat16")
    if load_in:
        wanted = quantize(wanted, load_in)
    made = random_model(SMALL, jax.random.key(3), load_in, on_host=on_host)
    if on_host:
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(nnx.state(made)))
        made = in_one_piece(made)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(made)))
    assert made.config == wanted.config
    made_state, wanted_state = nnx.state(made), nnx.state(wanted)
    assert jax.tree.structure(made_state) == jax.tree.structure(wanted_state)
    jax.tree.map(np.testing.assert_array_equal, made_state, wanted_state)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_random_model_may_have_its_embedding_on_the_host(on_host):
    """As loading for a run with an adapter leaves it: the same numbers, which in_one_piece does not move either."""
    made = random_model(SMALL, jax.random.key(3), "nf4", tables_on_host=True, on_host=on_host)
    made = in_one_piece(made, tables_on_host=True)
    kept = [leaf for leaf in jax.tree.leaves(nnx.state(made)) if isinstance(leaf, np.ndarray)]
    assert len(kept) == 1 and kept[0] is made.embedding.weight.get_value()
    wanted = random_model(SMALL, jax.random.key(3), "nf4")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(made), nnx.state(wanted))


@pytest.mark.full
def test_a_start_says_where_its_time_went(tmp_path):
    model = model_from_config(CONFIGS["mistral"] | {"vocab_size": 512}, jax.random.key(0), "bfloat16")
    save_pretrained(model, tmp_path / "model")
    startup.tiny_tokenizer(tmp_path / "model")
    rows = [{"text": " ".join(f"w{row + i}" for i in range(40))} for row in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = startup.write_recipe(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", 2, 32)
    marks = startup.run_child(recipe, os.environ | {"JAX_PLATFORMS": "cpu", "JAXTUNE_CACHE": str(tmp_path / "tokens")})
    for order in (
        ("python", "imports", "loaded", "state", "first_step", "done"),
        ("imports", "tokenizer", "prepared", "compiled", "state"),
    ):
        times = [marks[name] for name in order]
        assert times == sorted(times) and times[0] > 0
    record = {"shape": "tiny", "bytes": 1e6, "plain_read_gb_per_second": 1.0, "runs": dict(cold=marks, cached=marks)}
    record |= {"device": "cpu", "versions": {"jax": "0"}, "commit": "0000000"}
    assert f"| **{marks['first_step']:.1f}** |" in startup_table(record)[2]


@pytest.mark.full
@pytest.mark.parametrize("arguments", ["--scales blocks --load-in fp8 --compute fp8", "--serial-transfers --plan auto"])
def test_programs_are_compiled_ahead_from_shapes_alone(monkeypatch, capsys, arguments):
    made = []

    def make_trainer(options, model):
        made.extend(jax.tree.leaves(nnx.state(model)))
        return trainer_of(options, model)

    trainer_of = compile_ahead.make_trainer
    shape = SMALL | dict(hidden_size=128, intermediate_size=256)
    monkeypatch.setitem(SHAPES, "small", shape)
    monkeypatch.setattr(compile_ahead, "prepare", lambda cache: None)
    monkeypatch.setattr(compile_ahead, "make_trainer", make_trainer)
    monkeypatch.setattr(sys, "argv", ["compile_ahead.py", "cache", f"--shape small --rows 1 --length 64 {arguments}"])
    assert compile_ahead.main() == 0
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0
    assert made and {type(leaf) for leaf in made} == {jax.ShapeDtypeStruct}


@pytest.mark.full
def test_experts_in_mxfp4_train_in_the_form_in_which_they_are_made(monkeypatch, tmp_path):
    """A model of random experts in MXFP4 has the shapes of the one that is planned, and its step trains."""
    small = {"num_hidden_layers": 2, "num_local_experts": 4, "vocab_size": 512, "hidden_size": 64}
    small |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setitem(SHAPES, "small", SHAPES["gpt-oss-20b"] | small)
    text = f"--shape small --load-in mxfp4 --rows 2 --length 32 --plan auto --steps 4 --cache {tmp_path}"
    options = step.arguments().parse_args(text.split())
    made, trainer_of = [], step.make_trainer

    def make_trainer(options, model):
        made.append(nnx.state(model))
        return trainer_of(options, model)

    monkeypatch.setattr(step, "make_trainer", make_trainer)
    assert honest(step.measure(options)) is None
    shapes = [
        jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), state)
        for state in (*made, nnx.state(step.abstract(options)))
    ]
    assert shapes[0] == shapes[1] and "uint8" in str(shapes[0])


def test_experts_have_adapters_where_a_model_has_them():
    adapter = step.adapter_config(SimpleNamespace(shape="gpt-oss-20b", rank=16))
    assert adapter.target_parameters == ("experts.gate_up_proj", "experts.down_proj")
    assert step.adapter_config(SimpleNamespace(shape="qwen3-14b", rank=16)).target_parameters is None


@pytest.mark.parametrize("case", [*memory.CASES.values(), *cases.STEPS.values()], ids=lambda case: case.arguments)
def test_every_case_is_one_that_the_step_can_run(case):
    """A case that ends in a usage error would be found out on the GPU only."""
    texts = step_arguments(case, "trace")
    wanted = step.arguments().parse_args(texts)
    config = step.train_config(wanted)  # as the Trainer will have it: it refuses what cannot be
    assert wanted.optim_offload == config.optim.offload == ("--optim-offload" in texts)
    assert (config.adapter is None) == ("--rank 0" in case.arguments)
    assert "unused" not in texts and "{folder}" not in texts


def test_every_case_has_its_record_and_every_step_that_is_stored_its_case():
    def stored(name):
        return json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))

    steps, kept = stored("steps.json"), stored("memory.json")["cases"]
    unmeasured = {"qwen3_moe_fp8_blocks", *cases.SETS["small"], *cases.SETS["ablation"], *cases.SETS["roof"]}
    unmeasured -= {"8b"}  # yet
    assert set(cases.STEPS) - unmeasured == set(steps) and not unmeasured & set(steps)
    assert set(memory.CASES) < set(kept)
    assert set(mesh.CASES) - mesh.NOT_MEASURED == set(stored("mesh_2.json")["cases"])
    ran = {name: (cases.STEPS[name], record) for name, record in steps.items()}
    ran |= {f"memory {name}": (case, kept[name]) for name, case in memory.CASES.items()}
    for name, (case, record) in ran.items():
        wanted = step.arguments().parse_args(step_arguments(case, "trace"))
        asked = {"objective": "sft", "scales": "rows", "adapter_rank": wanted.rank}
        for key in ("shape", "rows", "length", "documents", "load_in", "budget_gb", "compute", "qat", *asked):
            found = record.get(key)
            assert (asked.get(key) if found is None else found) == getattr(wanted, key, asked.get(key)), (name, key)
        assert record.get("precision", {}) == step.precision_map(wanted), name


def test_every_part_is_a_script_that_is_there_and_knows_its_cases():
    parts = [part.arguments.split()[1:] for name, part in cases.PARTS.items() if name in cases.SETS["memory"]]
    assert sorted(name for names in parts for name in names) == sorted(memory.CASES)
    for part in cases.PARTS.values():
        assert (ROOT / part.arguments.split()[0]).is_file()
    assert {name for names in cases.SETS.values() for name in names} <= {*cases.PARTS, *cases.STEPS}


def test_what_is_worse_than_its_floor_or_than_the_stored_record_is_named(tmp_path, monkeypatch, capsys):
    """By the command, over a part that writes a record; one that fails takes no other with it."""
    script = tmp_path / "part.py"
    script.write_text("import pathlib, sys; pathlib.Path(sys.argv[3]).write_text(sys.argv[1])")
    rows = [
        ("fine", 0.9, 0.8, False),
        ("slow", 0.7, 0.8, False),
        ("slower than before", 0.9, None, False),
        ("big", 1.1, 1.0, True),
        ("bigger than before", 1.1, None, True),
    ]
    record = [dict(what=what, value=value, floor=floor, at_most=most) for what, value, floor, most in rows]
    stored = [dict(row, value=1.0 if "before" in row["what"] else row["value"]) for row in record]
    monkeypatch.setattr(command, "RESULTS", tmp_path / "stored")
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored/out.json").write_text(json.dumps({"device": "a GPU", "must_show": stored}))
    new = shlex.quote(json.dumps({"device": "a GPU", "must_show": record}))
    parts = {"bad": cases.Part(f"{script}", "x.json", 60), "good": cases.Part(f"{script} {new}", "out.json", 60)}
    monkeypatch.setattr(command, "PARTS", parts)
    assert command.main([str(tmp_path / "out"), "bad", "good"]) == 1
    said = capsys.readouterr().out
    assert "bad: 0 s\n  exit status 1" in said and "IndexError" in said
    for what in (
        "slow: 0.7, at least 0.8",
        "slower than before: 0.9, was 1",
        "big: 1.1, at most 1 ",
        "bigger than before",
    ):
        assert f"  {what}" in said
    assert "fine" not in said


def test_a_figure_that_misses_its_floor_is_marked_in_the_table():
    row = dict(what="gain", value=1.05, floor=1.0, goal=1.2, at_most=False)
    assert rows_of([row], with_kernel=False) == ["| gain | 1.05 | 1 | 1.2 |"]
    assert rows_of([row | {"value": 0.9}], with_kernel=False) == ["| gain | 0.9 (missed) | 1 | 1.2 |"]
    assert rows_of([row | {"at_most": True}], with_kernel=False) == [
        "| gain | 1.05 (missed) | at most 1 | at most 1.2 |"
    ]


def test_budgets_are_twelve_a_model_and_what_they_came_to_is_told():
    for model, (arguments, smallest) in budgets.MODELS.items():
        assert 7.5 <= smallest < 60
        wanted = step.arguments().parse_args(step_arguments(budgets.step_of(model, smallest), "trace"))
        assert step.train_config(wanted).memory.budget_gb == pytest.approx(smallest, rel=1e-6) and arguments
    curve = {f"{card:g}": 100.0 * (1 - 2.0**-card) for card in (0.5, *range(1, 31))}  # steep, and then level
    chosen = budgets.spread(curve, 1)
    assert len(chosen) == 12 and chosen == sorted(set(chosen)) and (chosen[0], chosen[-1]) == (1, 30)
    assert chosen[:4] == [1, 2, 3, 4] and budgets.steepest(curve, 1)[0] == "1"
    assert budgets.falls({"10": 95.0, "8": 90.0, "60": 100.0}) == pytest.approx({"8": 1 - 90 / 95, "10": 0.05})
    case = {"trains": True, "compilations": 2, "tokens_per_second": 100.0}
    cases_ = {"8": case | {"tokens_per_second": 90.0}, "10": case, "12": {"failed": "no", "trains": False}}
    shown = {row["what"]: row for row in budgets.must_show({"models": {"m": {"cases": cases_}}})}
    assert shown["cases that train, share"]["value"] == pytest.approx(2 / 3)
    assert shown["most compilations"]["value"] == 2 and shown["most compilations"]["at_most"]
    assert shown["m: largest fall of speed to the next card"]["value"] == pytest.approx(0.1)


@pytest.mark.full
def test_a_little_memory_less_costs_little_speed():
    """By the planner's forecasts of an 8B in NF4: at most 4 % from each of its twelve budgets to the next card, and no
    more for 1 % of memory where it is shortest."""
    ahead = budgets.Ahead("8b_nf4", 4)
    twelve = [7.5, 7.88, 8.33, 9.39, 10.48, 11.46, 12.47, 13.51, 17.16, 21.48, 30.3, 60]
    for some in (twelve, [7.5 * 1.01**power for power in range(8)]):
        lost = budgets.falls({f"{card:g}": ahead.next(card)[0].tokens_per_second for card in some})
        assert max(lost.values()) <= budgets._FALL


def test_the_lives_on_cards_are_recipes_that_fit_them():
    """Each is a packaged recipe of a shape that the benchmarks know, and its overrides are keys of the config."""
    for name, life in cards.LIVES.items():
        config = load_config(life.recipe, [*life.overrides, "data.train=rows.jsonl"])
        assert SHAPES[life.shape], name
        assert (life.result == "merged") == (config.adapter is None)
        assert life.card_gib in (12, 16, 24, 80)


@pytest.mark.full
def test_a_phase_of_a_life_is_recorded_with_what_it_took(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.record.driver_bytes", lambda: 80e9)
    made = {"name": "qlora-8b", "cap_bytes": 12e9, "phases": {}}
    call = cards.Call(
        cards.LIVES["qlora-8b"], tmp_path, tmp_path, patience.until(), made, tmp_path / "cards.json", "abc"
    )
    assert call.environment("train")["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.150000"
    assert call.run("evaluate", ["--version"])
    assert not call.run("generate", ["generate", str(tmp_path / "nothing"), "--prompt", "Hello"])
    phases = json.loads((tmp_path / "cards.json").read_text())["lives"]["qlora-8b"]["phases"]
    assert (
        phases["evaluate"]["commit"] == "abc"
        and phases["evaluate"]["exit"] == 0
        and "problem" not in phases["evaluate"]
    )
    assert phases["evaluate"]["peak_host_bytes"] >= 0 and phases["evaluate"]["seconds"] > 0
    assert phases["generate"]["exit"] == 2 and "nothing" in phases["generate"]["problem"]


def test_what_qat_regains_is_a_mean_over_seeds_and_is_held_against_their_deviation():
    def seed(plain, rounded, qat):
        return {"base": 2.0, "plain": plain, "int4": {"rounded": rounded, "qat": qat}, "seconds": 1.0}

    found = qat_quality.summary({"3": seed(0.10, 0.20, 0.11), "4": seed(0.11, 0.21, 0.14), "5": seed(0.12, 0.32, 0.16)})
    assert (found["plain"], found["deviation"]) == pytest.approx((0.11, 0.01))
    figures = found["formats"]["int4"]
    assert figures["regained_each"] == pytest.approx([0.9, 0.7, 0.8]) and figures["regained"] == pytest.approx(0.8)
    assert (figures["cost"], figures["over_deviation"]) == pytest.approx((0.4 / 3, 40 / 3))
    shown = [(row["value"], row["floor"], row["goal"]) for row in qat_quality.must_show(found)]
    assert shown == [(figures["over_deviation"], 10, None), (figures["regained"], 0.7, 0.85)]
    alone = qat_quality.summary({"0": seed(0.10, 0.20, 0.11)})
    assert alone["deviation"] is None and len(qat_quality.must_show(alone)) == 1


def test_a_record_of_qat_is_added_to_by_the_same_settings_alone(tmp_path):
    facts = {"commit": "abc", "settings": {"steps": 4}}
    file = tmp_path / "qat_quality.json"
    assert qat_quality.begun(file, facts) == {**facts, "seeds": {}}
    file.write_text(json.dumps({**facts, "seeds": {"3": {"plain": 1.0}}}))
    assert qat_quality.begun(file, facts)["seeds"] == {"3": {"plain": 1.0}}
    with pytest.raises(SystemExit, match="settings is {'steps': 4} there and {'steps': 5} here"):
        qat_quality.begun(file, facts | {"settings": {"steps": 5}})


def test_a_part_says_where_its_threads_were():
    begun, ended = threading.Event(), threading.Event()

    def wait_here():
        begun.set()
        ended.wait()

    with Part() as part, ThreadPoolExecutor(1, thread_name_prefix="waiting") as pool:
        pool.submit(wait_here)
        begun.wait()
        time.sleep(0.3)
        part.seconds["asleep"] += 0.3
        ended.set()
    places = part.record["threads"]["places"]
    assert part.record["seconds"] >= 0.3 and part.record["parts"] == {"asleep": 0.3}
    most, share = next(iter(places["waiting"].items()))
    assert most.endswith(" wait") and "threading.py:" in most and share > 0.5
    assert any(place.endswith("test_a_part_says_where_its_threads_were") for place in places["MainThread"])


def test_a_copy_of_files_is_measured_and_removed(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(bytes(1 << 20))
    files.flush(tmp_path / "model", drop=True)
    copied = files.copied(tmp_path / "model")
    assert copied["bytes"] == 1 << 20 and copied["flushed_seconds"] >= copied["seconds"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert files.read_by_threads(tmp_path / "model", new_memory=True) > 0


@pytest.mark.full
def test_a_step_is_timed_with_the_embedding_on_either_side(monkeypatch, tmp_path):
    """On the host, each step's rows are looked up while the step before is computed. The losses are the same bits."""
    monkeypatch.setitem(SHAPES, "small", SMALL | {"vocab_size": 512})
    text = f"--shape small --load-in nf4 --rows 2 --length 32 --plan keep --steps 4 --cache {tmp_path}"
    trainer_of, losses = step.make_trainer, []
    for on_host in (True, False):

        def make_trainer(options, model, on_host=on_host):
            trainer = trainer_of(options, model)
            plan = trainer.planner.plan.at(embeddings=on_host)
            trainer.planner.adopt(plan.to_record() | partition.MeshShape.of(trainer.mesh).to_record())
            trainer.engine.follow_plan()
            return trainer

        monkeypatch.setattr(step, "make_trainer", make_trainer)
        record = step.measure(step.arguments().parse_args(text.split()))
        assert honest(record) is None and record.get("embeddings") == ("host" if on_host else None)
        losses.append(record["losses"])
    assert losses[0] == losses[1]
