"""The table maker refuses records that prove nothing; what the README and docs/measured.md show is what is stored."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import CONFIGS

from benchmarks.kernels import quant_matmul as quant_benchmark
from benchmarks.random_model import random_model
from benchmarks.record import honest
from benchmarks.shapes import SHAPES
from benchmarks.table import Rejected, ablation_table, attention_pair_text, load, measured, memory_table, startup_table
from benchmarks.train import (
    ablation,
    attention_pair,
    compile_ahead,
    equal_plans,
    longest,
    memory,
    qlora_load,
    quant_acceptance,
    startup,
    step,
    throughput,
)
from jaxtune.models.config import MoEConfig
from jaxtune.models.hf import model_from_config, save_pretrained
from jaxtune.models.layers.experts import ExpertLora, MoE
from jaxtune.models.quant import quantize
from jaxtune.models.registry import config_from_hf
from jaxtune.pallas import tuning
from jaxtune.pallas.attention import api, reference

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
    record = GOOD | change
    assert words in honest(record)
    (tmp_path / "step.json").write_text(json.dumps(record))
    with pytest.raises(Rejected, match=words):
        load(tmp_path)


@pytest.mark.parametrize("key", ["first_loss", "smallest_grad_norm_by_step_2", "vocab_size"])
def test_a_record_without_its_proof_is_rejected(key):
    assert honest({k: v for k, v in GOOD.items() if k != key}) == f"{key} is missing"


def test_readme_tables_and_picture_show_the_stored_records():
    done = subprocess.run(
        [sys.executable, "benchmarks/table.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


SMALL = SHAPES["qwen3-32b"] | dict(
    vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_a_random_model_made_by_layers_is_the_one_made_at_once(load_in):
    wanted = model_from_config(SMALL, jax.random.key(3), "bfloat16")
    if load_in:
        wanted = quantize(wanted, load_in)
    made = random_model(SMALL, jax.random.key(3), load_in)
    assert made.config == wanted.config
    made_state, wanted_state = nnx.state(made), nnx.state(wanted)
    assert jax.tree.structure(made_state) == jax.tree.structure(wanted_state)
    jax.tree.map(np.testing.assert_array_equal, made_state, wanted_state)


def test_the_folder_of_the_loading_benchmark_loads(tmp_path):
    weight_bytes = qlora_load.write_folder(tmp_path / "model", SMALL, shard_bytes=10_000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    model = model_from_config(SMALL, jax.random.key(0), "bfloat16")
    assert weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    found = qlora_load.load(tmp_path / "model")
    four_bit = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(quantize(model))))
    assert found["weights_gb"] == four_bit / 1e9 and found["device_peak_ratio"] is None  # a CPU does not say


def test_a_start_says_where_its_time_went(tmp_path):
    model = model_from_config(CONFIGS["mistral"] | {"vocab_size": 512}, jax.random.key(0), "bfloat16")
    save_pretrained(model, tmp_path / "model")
    startup.tiny_tokenizer(tmp_path / "model")
    rows = [{"text": " ".join(f"w{row + i}" for i in range(40))} for row in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = startup.write_recipe(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", 2, 32)
    folders = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"), "JAXTUNE_CACHE": str(tmp_path / "tokens")}
    marks = startup.run_child(recipe, os.environ | folders | {"JAX_PLATFORMS": "cpu"})
    for order in (
        ("python", "imports", "device", "loaded", "state", "first_step", "done"),
        ("imports", "tokenizer", "prepared", "compiled", "state"),
    ):
        times = [marks[name] for name in order]
        assert times == sorted(times) and times[0] > 0
    assert marks["programs"]["programs"] > 2 and marks["programs"]["compile_seconds"] > 0
    record = {"shape": "tiny", "bytes": 1e6, "plain_read_gb_per_second": 1.0, "runs": dict(cold=marks, cached=marks)}
    record |= {"device": "cpu", "versions": {"jax": "0"}, "commit": "0000000"}
    assert f"| **{marks['first_step']:.1f}** |" in startup_table(record)[2]


@pytest.mark.parametrize(
    ("name", "change"),
    [("bf16 + LoRA", 0.5), ("nf4 base", -0.1), ("nf4 + LoRA", 0.1), ("bf16 + LoRA with QAT int4", 0.05)],
)
def test_each_bound_of_the_acceptance_run_can_fail(name, change):
    good = {
        "bf16 base": 3.5,
        "nf4 base": 3.55,
        "bf16 + LoRA": 3.0,
        "nf4 + LoRA": 3.01,
        "bf16 + LoRA, rounded to int4 afterwards": 3.1,
        "bf16 + LoRA with QAT int4": 3.03,
    }
    assert all(verdict["holds"] for verdict in quant_acceptance.verdicts(good).values())
    assert not all(v["holds"] for v in quant_acceptance.verdicts(good | {name: good[name] + change}).values())


@pytest.fixture
def attention_pair_record(monkeypatch, tmp_path):
    """A run of tiny size whose second arm attends to twice the values."""
    whole = api.implementations

    def doubled(*arrays, **options):
        out, lse = reference.forward(*arrays, **options)
        return 2 * out, lse

    module = types.SimpleNamespace(forward=doubled, backward=reference.backward)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "doubled", module)
    monkeypatch.setattr(api, "implementations", lambda *a, **o: {**whole(*a, **o), "doubled": lambda: None})
    monkeypatch.setitem(SHAPES, "tiny", SMALL | dict(num_hidden_layers=1))
    options = ["--shape", "tiny", "--rows", "2", "--length", "64", "--rank", "2", "--steps", "1", "--rounds", "2"]
    parsed = attention_pair.arguments().parse_args([*options, "--arms", "reference", "doubled"])
    parsed.profile = str(tmp_path / "profile")
    return attention_pair.measure(parsed)


def test_two_attentions_in_one_step(attention_pair_record, tmp_path):
    """Each arm runs its own implementation, from the same weights, and both have a profile."""
    record = attention_pair_record
    ours, other = record["arms"]["reference"], record["arms"]["doubled"]
    assert ours["losses"][0] != other["losses"][0] and record["largest_loss_difference"] > 0
    assert all(honest(arm) is None for arm in (ours, other))
    assert len(ours["step_seconds_of_rounds"]) == len(other["step_seconds_of_rounds"]) == 2
    assert record["speedup"] == other["step_seconds"] / ours["step_seconds"]
    for arm in (ours, other):
        profile = arm["profile"]
        assert sum(profile["categories"].values()) == pytest.approx(profile["step_ms"], rel=1e-6)
    (line,) = attention_pair_text(record)
    assert f"reference **{ours['step_seconds']:.3f} s** a step (" in line and "GEMM " in line
    assert f"**{record['speedup']:.3f}** times as fast" in line and line in measured([record])
    other["first_loss"] = 0.0
    (tmp_path / "pair.json").write_text(json.dumps(record))
    with pytest.raises(Rejected, match="not near ln V"):
        load(tmp_path)


def test_what_packing_metadata_compares_is_one_model_and_differs_in_what_it_says(tmp_path):
    """The same loss in every way; XLA merges what is built in every layer, unless it is kept apart."""
    options = ["--tiny", "--models", "qwen3-0.6b", "--layers", "2", "--rows", "1", "--length", "128", "--rounds", "1"]
    command = [sys.executable, "benchmarks/train/packing_metadata.py", "--output", str(tmp_path / "out.json"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (model,) = json.loads((tmp_path / "out.json").read_text())["models"]
    arms = model["arms"]
    assert list(arms) == ["once", "per_layer", "per_layer_kept", "per_layer_host"]
    assert len({round(arm["loss"], 5) for arm in arms.values()}) == 1
    scans = [arm["scans_in_program"] for arm in arms.values()]
    assert scans[0] == scans[1] < scans[2]


def ablation_gradients(how, model, x, choice):
    """(output, gradients by all that trains and x) of a layer's experts, computed in one of the ablation's ways."""
    graph, trained, rest = nnx.split(model, nnx.Param, ...)
    probe = jax.random.normal(jax.random.key(9), x.shape)

    @jax.jit
    def run(trained, x):
        def total(trained, x):
            moe = nnx.merge(graph, trained, rest)
            gate_up, down = ablation._EXPERTS.get(how, (type(moe).gate_up, type(moe).down))
            out = down(moe, gate_up(moe, x, choice), choice, x)
            return (out * probe).sum(), out

        return jax.grad(total, (0, 1), has_aux=True)(trained, x)

    gradients, out = run(trained, x)
    return out, gradients


@pytest.mark.parametrize("gpt_oss", [True, False])
def test_the_ways_to_compute_experts_are_numerically_equal(gpt_oss):
    """With padding, an expert without tokens, biases where the family has them, and adapters."""
    options = dict(router_bias=True, expert_bias=True, transposed=True, interleaved=True, swiglu_limit=0.7)
    moe = MoEConfig(5, 2, 24, **(options if gpt_oss else {}))
    config = dataclasses.replace(config_from_hf(dict(SMALL)), moe=moe, initializer_range=0.3)
    module = MoE(config, jax.random.key(0), "float32")
    for seed, linear in enumerate((module.experts.gate_up_proj, module.experts.down_proj)):
        count, out_size, in_size = linear.sizes
        linear.lora = ExpertLora(count, in_size, out_size, 4, 8.0, jax.random.key(seed))
        linear.lora.b.set_value(0.1 * jax.random.normal(jax.random.key(seed + 7), linear.lora.b.shape))
        if linear.bias is not None:
            linear.bias.set_value(jax.random.normal(jax.random.key(seed + 3), linear.bias.shape))
    x = jax.random.normal(jax.random.key(5), (2, 30, 32))
    choice = np.stack([np.random.default_rng(i).permutation(4)[:2] for i in range(60)]).astype(np.int32)  # never 4
    choice[40:47] = 5
    want = ablation_gradients("sorted", module, x, jnp.asarray(choice))
    for how in ("ragged", "loop"):
        got = ablation_gradients(how, module, x, jnp.asarray(choice))
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            where = f"{how} {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()), rtol=0, err_msg=where)
        assert np.abs(want[0]).max() > 0.1 and not np.asarray(got[0]).reshape(60, -1)[40:47].any()


def test_the_arms_of_the_ablation_train_one_model():
    """On against everything off at once, of a tiny gpt-oss: one loss, one gradient."""
    options = types.SimpleNamespace(layers=2, rows=2, length=64, steps=1, tiny=True)
    found = dict(ablation.measure("gpt-oss-20b", ["on", "all_off"], options))
    for key in ("loss", "gradient_norm"):
        np.testing.assert_allclose(found["all_off"][key], found["on"][key], rtol=0.02, err_msg=key)  # in bfloat16
    assert all(len(entry["forward_backward_ms"]) == ablation.RUNS for entry in found.values())
    entries = {f"gpt-oss-20b {name.replace('on', 'offload')}": entry for name, entry in found.items()}
    (row,) = ablation.gains(entries)
    low, high = row["forward_backward_gain_range"]
    assert row["claim"] == "all together" and low <= row["forward_backward_gain"] <= high


def test_the_ablation_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Every arm once; one that failed is written down, one that there was no time for is not."""
    calls = []

    def child(model, names, options, seconds):
        calls.extend(names)
        measured = {"forward_ms": [1.0, 2.0], "loss": 1.0}
        found = {name: measured | {"forward_backward_ms": [4.0, 6.0 if name == "serial" else 5.0]} for name in names}
        if seconds < 100:
            del found["all_off"]
        if "layout_kept" in found:
            found["layout_kept"] = {"error": "out of memory"}
        return found

    monkeypatch.setattr(ablation, "_child", child)
    output = tmp_path / "out.json"

    def call(*options):
        calls.clear()
        argv = ["ablation.py", "--output", str(output), "--models", "llama-3.2-1b", *options]
        monkeypatch.setattr(sys, "argv", argv)
        assert ablation.main() == 0
        return list(calls)

    assert call("--arms", "on,layout_kept,serial") == ["on", "layout_kept", "serial"]
    assert call("--seconds", "1") == []
    assert call("--seconds", "95") == ["layout_host", "offload", "all_off"]
    assert call() == ["all_off"]
    assert call() == []
    assert call("--again") == ["layout_kept"]
    record = json.loads(output.read_text())
    rows = {row["off"]: row["forward_backward_gain"] for row in record["claims"]}
    assert rows == {"layout_host": 0.0, "serial": pytest.approx(5.0 / 4.5 - 1), "all_off": 0.0}
    where = dict(device="a GPU", versions={"jax": "1"}, commit="0123456789")
    for entry in record["entries"].values():
        entry.update(where if "error" not in entry else {})
    table = ablation_table(record)
    assert "| overlapped reload: not serial | llama-3.2-1b | - | **+11.1 %** | +0.0 % | -20.0 to +50.0 % |" in table
    assert table[-1].endswith("Without a result: llama-3.2-1b layout_kept.")
    with pytest.raises(SystemExit):
        call("--layers", "3")


def test_programs_are_compiled_ahead_whatever_becomes_of_one(monkeypatch, capsys):
    """From shapes alone, with adapters on experts where the model has them; one that does not fit says so."""
    made = []

    def make_trainer(options, model):
        made.append((options.shape, options.rows, {type(leaf) for leaf in jax.tree.leaves(nnx.state(model))}))
        problem = None if options.rows == 2 else "does not fit\nfor reasons"

        def fit(shapes, first_step, print_line):
            assert shapes() == "shapes" and first_step == 0
            if problem:
                raise ValueError(problem)

        model = SimpleNamespace(first_shapes=lambda engine: "shapes")
        return SimpleNamespace(engine=SimpleNamespace(fit=fit), model=model)

    monkeypatch.setattr(compile_ahead, "make_trainer", make_trainer)
    monkeypatch.setattr(jax.config, "update", lambda key, value: None)
    cases = {"small": ["--shape", "gpt-oss-20b", "--rows", "2"], "large": ["--shape", "qwen3-0.6b", "--rows", "32"]}
    cases["large"] += ["--transfers", "serial"]
    assert list(compile_ahead.compile_ahead(cases, "nowhere")) == ["small"]
    assert capsys.readouterr().out == "large: not compiled ahead: does not fit\n"
    assert sorted(made) == [("gpt-oss-20b", 2, {jax.ShapeDtypeStruct}), ("qwen3-0.6b", 32, {jax.ShapeDtypeStruct})]
    adapter = step.adapter_config(SimpleNamespace(shape="gpt-oss-20b", rank=16))
    assert adapter.target_parameters == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    assert step.adapter_config(SimpleNamespace(shape="qwen3-0.6b", rank=16)).target_parameters is None


# ---- memory


@pytest.mark.parametrize("name", list(memory.CASES))
def test_every_case_is_one_that_its_script_can_read(name):
    """A case that ends in a usage error would be found out on the GPU only."""
    options = SimpleNamespace(shape="llama-3.1-8b", steps=5, override="{}")
    texts, case = memory.arguments_of(name, options), memory.CASES[name]
    if "script" not in case:
        wanted = step.arguments().parse_args(texts)
        config = step.train_config(wanted)  # as the Trainer will have it: it refuses what cannot be
        assert wanted.optim_offload == config.optim.offload == case.get("optim_offload", False)
        assert wanted.transfers == case.get("transfers", "overlapped")
        assert (config.adapter is None) == (case.get("rank") == 0)
    else:
        assert (ROOT / "benchmarks" / case["script"]).exists()
        if case["script"].endswith("longest.py"):
            longest.arguments().parse_args([*texts, "--output", "x"])
        else:
            assert texts == []


def measured_cases() -> dict[str, dict]:
    """What would meet every floor."""
    case = dict(tokens_per_second=16_000.0, step_seconds=1.0, predicted_peak_gb=20.0, peak_memory_gb=20.0)
    case |= dict(host_gb=30.0, device="NVIDIA H200", compile_seconds_cold=50.0, compile_seconds_cached=5.0)
    cases = {name: dict(case) for name, made in memory.CASES.items() if "script" not in made}
    cases["inputs_offloaded"] |= dict(peak_memory_gb=16.0, predicted_peak_gb=16.0)
    cases["document"] |= dict(tokens_per_second=20_000.0)
    cases["link_bound"] |= dict(step_seconds=1.1)
    cases["loss"] = dict(chunked_gb=0.95, speed=0.95)
    cases |= {"longest": dict(length=350_208, met=True), "longest_check": dict(met=True)}
    cases["equal_plans"] = equal_plans_record(0, 1e-4)
    return cases


def equal_plans_record(not_bit_for_bit: int, gradient: float, cudnn: float = 1e-4) -> dict:
    plan = dict(tensors_not_bit_for_bit=not_bit_for_bit, not_deterministic=dict(loss=0.0, any_tensor=gradient))
    whole = [dict(length=4096, attention="cudnn", apart={"keep, run twice": dict(loss=0.0, any_tensor=cudnn)})]
    return dict(plans=dict(keep=plan), whole_rows=whole, two_models_in_turn=dict(tensors_that_changed_between_turns=0))


FALLS_SHORT = [
    ("24gb", "tokens_per_second", 14_000.0, 2), ("16gb_one", "tokens_per_second", 10_000.0, 1),
    ("10.8gb", "tokens_per_second", 12_000.0, 1), ("inputs_offloaded", "peak_memory_gb", 17.0, 1),
    ("inputs_offloaded", "tokens_per_second", 15_000.0, 1), ("document", "tokens_per_second", 18_000.0, 1),
    ("link_bound", "step_seconds", 1.3, 1), ("compile", "compile_seconds_cold", 91.0, 1),
    ("compile", "compile_seconds_cached", 11.0, 1), ("3b", "peak_memory_gb", 21.0, 1),
    ("3b", "peak_memory_gb", 18.0, 1),
    ("loss", "chunked_gb", 1.1, 1), ("loss", "speed", 0.8, 1), ("longest", "met", False, 1),
    ("longest_check", "met", False, 1),
    ("equal_plans", "plans", equal_plans_record(1, 1e-4)["plans"], 1),
    ("equal_plans", "plans", equal_plans_record(0, 1e-2)["plans"], 1),
    ("equal_plans", "whole_rows", equal_plans_record(0, 0.0, 5e-3)["whole_rows"], 1),
    ("equal_plans", "two_models_in_turn", dict(tensors_that_changed_between_turns=1), 1),
]  # fmt: skip


def test_what_must_be_shown_of_memory_is_met_by_what_meets_it():
    rows = memory.must_show(measured_cases())
    assert [row["what"] for row in rows if row["met"] is False] == []
    assert sum(row["met"] is True for row in rows) == 21
    assert memory.must_show({"24gb": {"failed": "out of memory"}}) == []


@pytest.mark.parametrize(("name", "key", "value", "count"), FALLS_SHORT)
def test_each_floor_of_memory_can_be_missed(name, key, value, count):
    cases = measured_cases()
    cases[name][key] = value
    rows = memory.must_show(cases)
    assert sum(row["met"] is False for row in rows) >= count
    record = {"cases": cases | {"kept": {"failed": "it | died"}}, "must_show": rows, "device": "NVIDIA H200"}
    lines = memory_table(record | {"versions": {"jax": "0"}, "commit": "0123456789"})
    assert sum("(missed)" in line for line in lines) >= count and "Without a result: kept (died)" in lines[-1]


def test_a_long_row_is_checked_against_short_ones(tmp_path):
    """At a length that a CPU can do; and the check can fail."""
    options = ["check", "--tiny", "--length", "96", "--tile", "24", "--layers", "1", "--rank", "4"]
    found = longest.check(longest.arguments().parse_args([*options, "--output", str(tmp_path / "out.json")]))
    assert found["met"] and 0 < found["hidden_states_difference"] < 0.02
    one, other = np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)
    other[2] = 0
    assert longest.difference([one], [one]) == 0 and longest.difference([one], [other]) > longest.TOLERANCE


@pytest.mark.parametrize("deterministic", [True, False])
def test_plans_are_the_same_bits_in_bfloat16(deterministic):
    """Without the options of the step, a fusion goes on with what it has in float32, unless a transfer cuts it."""
    model = equal_plans.make_model("llama-3.2-1b", SimpleNamespace(layers=2, tiny=True), 0)
    gradients = equal_plans.Gradients(model, deterministic)
    kept = gradients(equal_plans.KEEP, 8)
    assert len(kept) == 29 and np.isfinite(kept[0])
    assert equal_plans.differing(gradients(equal_plans.OFFLOAD, 8), kept) == 0


def test_every_program_of_the_quantised_products_is_traced_with_the_blocks_in_force():
    def product(x):
        blocks = tuning.tuned("small_matmul", "1 x 1, tokens=1", x.dtype)
        return x * blocks["groups"] if blocks else -x

    x = jnp.float32(1)
    for blocks, want in (({"groups": 2}, 2), ({"groups": 3}, 3), ({}, -1)):
        with tuning.forced("small_matmul", blocks):
            assert quant_benchmark.compiled(product, x)(x) == want


# ---- what metrics.jsonl says of the speed


def lines_of_a_run(step_seconds: float = 0.5, said: float = 0.5) -> list[dict]:
    """Sixty steps of 100 tokens that take step_seconds and are said to take `said`, with an evaluation and a save."""
    now, lines = 130.0, [{"step": 0, "time": 130.0, "compile_seconds": 20.0, "load_seconds": 10.0}]
    for number in range(1, 61):
        now += step_seconds
        speeds = {"steps": 1, "step_seconds": said, "tokens_per_second": 100 / said}
        lines.append({"step": number, "time": now, "loss": 1.0, **speeds})
        if number in (20, 45):
            now += 7.0
            lines.append({"step": number, "time": now, "eval_seconds" if number == 20 else "save_seconds": 7.0})
    return lines


def test_speeds_that_are_true_pass():
    record = throughput.compare(lines_of_a_run(), 0.5, 100)
    assert [row["steps"] for row in record["between_pauses"]] == [19, 24, 14]
    assert throughput.wrong(record) == []
    assert record["sum_ratio"] == pytest.approx(1) and record["pauses_seconds"] == pytest.approx(44)


def test_speeds_that_are_not_true_are_named():
    found = throughput.wrong(throughput.compare(lines_of_a_run(said=0.45), 0.5, 100))
    assert [name.split(":")[0] for name in found] == [
        "steps from 1", "steps from 21", "steps from 46", "the profile's step", "the whole run"
    ]  # fmt: skip
    lost = [line for line in lines_of_a_run() if "eval_seconds" not in line]
    assert [name.split(":")[0] for name in throughput.wrong(throughput.compare(lost, 0.5, 100))][-1] == "the whole run"
