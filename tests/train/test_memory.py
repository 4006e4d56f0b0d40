"""The planner: what it counts, what it chooses, what it says when nothing fits, and what a run does with it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from step_costs import costs_of
from tiny_models import tiny_config, tiny_model

from benchmarks import forecasts as forecasts_of_records
from jaxtune import cli
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, LayerPlan, ResidualPlan, residuals_of
from jaxtune.models.stack.stack import layer_forward
from jaxtune.pallas.fitted import planned_for
from jaxtune.profile.data_sheets import DATA_SHEETS, data_sheet, known_devices
from jaxtune.system import host_memory, terminal
from jaxtune.train.config import (
    AdapterConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    PlanConfig,
    TrainConfig,
)
from jaxtune.train.config.file import config_to_yaml, load_config
from jaxtune.train.config.sections import HOSTED_OPTIMIZERS
from jaxtune.train.planning import choice, devices, fitting, plan_text
from jaxtune.train.planning.choice import PlanError, choose, smallest_plan
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.devices import CONTEXT_BYTES, find_device
from jaxtune.train.planning.forecasts import forecast, head_forecast
from jaxtune.train.planning.forward import forward_bytes
from jaxtune.train.planning.host_room import HostError, beside_moved
from jaxtune.train.planning.layer_forecasts import layer_forecast
from jaxtune.train.planning.movables import residuals
from jaxtune.train.planning.movables.residuals import best_layers, layer_plans
from jaxtune.train.planning.plan import StepPlan, parse_plan, residuals_text
from jaxtune.train.planning.planner import Planner
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config, tiny_budget

SHAPE = config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"])
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
DENSE = residuals_of(tiny_model().layers)
NAMES = [residual.name for residual in DENSE]
H200 = dataclasses.replace(find_device("NVIDIA H200", 140e9), host_memory_bytes=math.inf)


def config_8b(**changes) -> TrainConfig:
    settings = dict(
        model=ModelConfig(path="a shape", load_in="nf4"),
        data=DataConfig(train="rows"),
        adapter=AdapterConfig(),
        steps=9,
    )
    return TrainConfig(**(settings | changes))


@pytest.fixture(scope="module")
def parts_8b():
    return costs_of(SHAPE, config_8b())


# ---- plans as text


@pytest.mark.parametrize(
    "text",
    [
        "keep",
        "recompute",
        "recompute, layer_input=offload",
        "gate=offload, up=offload",
        "0-1: recompute; 2-4: gate=recompute, up=recompute; 5-5: keep",
        "recompute, layer_input=offload; tile=8192",
        "keep; whole=4",
        "0-2: recompute; 3-5: keep; tile=8192; whole=6",
        "recompute; whole=2; resident=6",
    ],
)
def test_the_text_of_a_plan_is_read_as_it_was_written(text):
    plan, moved = parse_plan(text, 6, DENSE)
    assert StepPlan(plan, 1, 1, moved).text == text
    assert parse_plan(residuals_text(plan), 6, DENSE)[0] == plan


def test_a_word_with_exceptions_is_what_it_says():
    plan = parse_plan(" 0: recompute,mid=keep ;1-2 :up=offload", 3, DENSE)[0].layers
    assert plan == (LayerPlan("recompute", mid="keep"), *[LayerPlan(up="offload")] * 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kep", "cannot read 'kep' (nearest: keep)"),
        ("gate=drop", "residual gate: placement 'drop' is not one of keep, offload, recompute"),
        ("gates=keep", "cannot read 'gates=keep': no layer has a residual 'gates' (nearest: gate)"),
        ("layer_input=recompute", "nothing can recompute it"),
        ("0-2: keep", "layers 0-2 are not in a model of 2 layers"),
        ("0: keep", "layer 1 is not named"),
        ("0-1: keep; 1: recompute", "layer 1 is named twice"),
        ("up=offload, keep", "cannot read 'keep'"),
        ("tile=8", "cannot read 'tile=8'"),
        ("keep; whole=3", "whole=3 is more than the model's 2 layers"),
        ("keep; resident=3", "resident=3 is more than the model's 2 layers"),
    ],
)
def test_a_plan_that_cannot_be_read(text, words):
    with pytest.raises(ValueError) as error:
        parse_plan(text, 2, DENSE)
    assert str(error.value).startswith(f"memory.plan = {text!r}: ") and words in str(error.value)


# ---- what is counted


@pytest.mark.parametrize("length", [64, 192])
@pytest.mark.parametrize("experts", [False, True])
def test_residual_bytes_are_those_of_the_arrays(experts, length):
    moe = MoEConfig(num_experts=8, experts_per_token=3, expert_size=8)
    model = tiny_model(moe=moe, layers=(LayerSpec(),)) if experts else lora_model("float32", layers=1)
    parts = step_cost(model, StepSpec.of(make_config("out")))
    graph, trainable, frozen = nnx.split(model.layers[0], nnx.Param, ...)
    names = tuple(residual.name for residual in model.layers[0].residuals())
    x = np.zeros((2, length, 16), np.float32)
    _, arrays, *_ = layer_forward(
        graph, model.config.layers[0], names, trainable, frozen, x, model.layout((2, length)), None
    )
    layers = parts.layers
    counted = {name: layers.residual_bytes(name, 2 * length) for name in layers.residuals}
    assert counted == {n: array.nbytes for n, array in arrays.items()}
    assert ("gate_up" in arrays) == experts and ("gate" in arrays) != experts


@pytest.mark.full
def test_experts_count_as_a_token_meets_them():
    """Qwen3-30B-A3B: 3.3 billion weights meet a token, 30.5 billion are stored."""
    config = config_8b(model=ModelConfig(path="a shape"), adapter=AdapterConfig(target_parameters=EXPERTS))
    shape = config_from_hf(PUBLISHED["Qwen/Qwen3-30B-A3B"])
    parts = costs_of(shape, config)
    met = sum(segment.work.flops for segment in parts.layers.segments) / 2 * parts.shape.num_layers
    assert met + shape.vocab_size * shape.hidden_size == pytest.approx(3.03e9, rel=0.01)  # embedding: 0.31e9 more
    assert parts.fixed["frozen weights"] / 2 == pytest.approx(30.53e9, rel=0.001)
    rank = 16 * parts.shape.num_layers
    attention = rank * ((2048 + 4096) + 2 * (2048 + 512) + (4096 + 2048))
    assert parts.update.trained == attention + 128 * rank * ((2048 + 1536) + (768 + 2048))
    # In 16 bits, with 16 ranks in the room of 64, once for both directions where every residual is kept.
    shared = parts.layers.shared
    assert shared == 2 * 48 * 128 * 64 * ((2048 + 1536) + (768 + 2048))
    # The low-rank inputs of a layer's segments: 16 numbers of two bytes for each of a token's eight experts.
    assert [s.low_rank for s in parts.layers.segments if s.name in ("expand", "contract")] == [2 * 16 * 8] * 2
    one = dataclasses.replace(config, micro_batches=1)
    keeps = choose(parts, StepSpec.of(one), H200, 140e9)
    assert residuals_text(keeps.plan.residuals) == "keep" and shared in keeps.parts.values()
    for budget in (keeps.peak_bytes - 1, keeps.peak_bytes - shared):  # others share nothing
        less = choose(parts, StepSpec.of(one), H200, budget)
        assert residuals_text(less.plan.residuals) != "keep" and less.peak_bytes <= budget
        assert shared not in less.parts.values()
    # Small micro-batches pay for empty rows: half a tile an expert.
    (work,) = (segment.work for segment in parts.layers.segments if segment.name == "expand")
    assert work.empty_flops == work.flops / 8 * 128 * 64


def test_gradients_of_experts_weights_take_the_time_of_whoever_computes_them():
    """A kernel on Hopper, with the speed of dense products; elsewhere XLA, which adds each tile's product of 128 rows
    to a sum in float32. They count in the backward alone."""
    tokens, shape = 16_384, config_from_hf(PUBLISHED["Qwen/Qwen3-30B-A3B"] | {"num_hidden_layers": 1})

    def seconds(adapter, device):
        config = config_8b(model=ModelConfig(path="a shape"), adapter=adapter)
        forecast = layer_forecast(costs_of(shape, config), KEEP, tokens, device)
        return forecast.forward, forecast.backward

    other = dataclasses.replace(H200, hopper=False)
    frozen, trained, elsewhere = seconds(AdapterConfig(), H200), seconds(None, H200), seconds(None, other)
    numbers = 3 * 2048 * 768  # of an expert
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    tiles = tokens * 8 / 128 + 128 / 2
    flops = 2.0 * numbers * 128 * tiles
    dense = 2.0 * (attention + 2048 * 128) * tokens
    assert trained[1] - frozen[1] == pytest.approx((flops + dense) / H200.gemm, rel=0.1)
    sums = 18 * numbers * tiles / H200.copy
    assert elsewhere[1] - trained[1] == pytest.approx(sums + (1 / 0.75 - 1) * flops / H200.gemm, rel=0.01)
    assert elsewhere[0] == trained[0]


def test_what_is_always_there_is_what_the_trainer_holds(tmp_path):
    for optimizer in ("adamw", "adamw_8bit", "lion_8bit", "muon", "adafactor"):
        config = make_config(tmp_path / optimizer, optim=OptimConfig(name=optimizer))
        trainer = Trainer(lora_model(), None, config, dataset(documents(20)))
        state, sums, frozen = trainer.model.first_state(trainer.engine)
        held = (frozen, trainer.model.trainable, state.trainable, state.opt_state, sums.gradients)
        assert list(trainer.planner.cost.fixed.values()) == [
            sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in held
        ]


def test_four_bits_and_shape_of_8b(parts_8b):
    assert parts_8b.fixed["frozen weights"] == pytest.approx(5.7025e9, rel=1e-4)  # as loaded: load_gaps.json
    assert parts_8b.update.trained == 41_943_040  # LoRA r=16 on all linears of Llama-3.1-8B, as PEFT counts them
    assert parts_8b.layers.residuals["gate"] == 2 * 14336
    assert parts_8b.layers.residuals["lse"] == 4 * 32


@pytest.mark.full
def test_a_forward_counts_the_parts_of_a_float32_head_on_hopper_only():
    config = config_8b(precision={"*": "bf16", "lm_head": "fp32"})
    parts = costs_of(SHAPE, config)
    head, one = 8.0 * SHAPE.vocab_size * SHAPE.hidden_size, 4.0 * SHAPE.vocab_size
    found = [forward_bytes(parts, 2048, 2048, device) for device in (H200, dataclasses.replace(H200, hopper=False))]
    assert found[0] - found[1] == pytest.approx(head + 2048 * one)
    assert forward_bytes(parts, 2048, 0, H200) < found[1]  # a forward without logits


# Compiled for an H200 without one (tests/gpu/aot): GB of temporaries at 4 layers and 8 x 2,048 tokens, unless said.
COMPILED = [
    ("keep", 4, 8, 2048, 8.039),
    ("recompute", 4, 8, 2048, 2.695),
    ("gate=offload, up=offload", 8, 8, 2048, 8.011),
    ("recompute, layer_input=offload", 8, 8, 2048, 2.307),
    # Compiled before the loss wrote the gradient of the hidden states over them; now 4.241.
    (", ".join(f"{name}=offload" for name in NAMES), 8, 8, 2048, 4.509),
    ("keep", 4, 2, 2048, 3.194),
]


@pytest.mark.parametrize(("text", "layers", "rows", "length", "gb"), COMPILED)
def test_temporaries_beside_the_compilers(parts_8b, text, layers, rows, length, gb):
    parts = dataclasses.replace(parts_8b.reshaped(num_layers=layers, rows=rows, length=length), fixed={})
    plan = StepPlan(parse_plan(text, layers, DENSE)[0], 1, 2**28 // SHAPE.vocab_size)
    assert forecast(parts, plan, H200).peak_bytes / 1e9 == pytest.approx(gb, rel=0.04)


@pytest.mark.full
def test_gate_and_up_are_written_over(parts_8b):
    """Where down_proj has an adapter alone, on every GPU; else on Hopper, in bfloat16."""
    plan = StepPlan(parse_plan("recompute", parts_8b.shape.num_layers, DENSE)[0], 1, 2093)

    def peaks(**changes):
        config = config_8b(**changes)
        parts = costs_of(SHAPE, config)
        head = dataclasses.replace(parts.head, dtype=np.dtype("float16"))  # one in float32 takes more on Hopper
        parts = dataclasses.replace(parts, head=head)
        return [forecast(parts, plan, find_device(name)).peak_bytes for name in ("NVIDIA H100", "A100")]

    wide = parts_8b.shape.rows * parts_8b.shape.length * parts_8b.layers.residuals["gate"]
    for adapter in (AdapterConfig(lora_dropout=0.1), AdapterConfig(use_dora=True), AdapterConfig(r=64)):
        here, elsewhere = peaks(adapter=adapter)
        assert 2.5 * wide < elsewhere - here < 3.5 * wide
    for changes in ({}, dict(precision="fp16"), dict(precision="fp32")):
        hopper, ampere = peaks(**changes)
        assert hopper == ampere
    in_float32, in_float16 = peaks(precision="fp32")[0], peaks(precision="fp16")[0]
    assert in_float32 - in_float16 > 2.5 * wide


@pytest.mark.full
def test_capped_logits_are_counted_beside_those_that_they_are_made_of(parts_8b):
    """As tests/gpu/aot/test_memory.py finds in the compiled loss."""
    capped = dataclasses.replace(SHAPE, final_soft_cap=30.0)
    parts = costs_of(capped, config_8b())
    most, usual = (head_forecast(one, 512, 4096, H200)[0] for one in (parts, parts_8b))
    assert most - usual == 2 * 512 * SHAPE.vocab_size


@pytest.mark.full
def test_a_head_in_float32_is_counted_by_its_time_and_its_memory():
    """One H200, steps.json: 8b_nf4_head beside 8b_nf4, 13,732 for 17,143 tokens/s, 65.0 for 58.3 GB."""
    usual, wide = (config_8b(precision=precision) for precision in ("bf16", {"lm_head": "fp32"}))
    plan = StepPlan(ResidualPlan.uniform(KEEP, SHAPE.num_layers), 1, 2**27 // SHAPE.vocab_size)
    seconds, sizes = [], []
    for config in (usual, wide):
        parts = costs_of(SHAPE, config)
        seconds.append(forecast(parts, plan, H200).step_seconds)
        sizes.append(head_forecast(parts, 512, 4096, H200)[0])
        time = parts.head.time(parts.shape.dtype, find_device("RTX 4090"))
        assert time == (1.0 if config is usual else 2.0)  # by the data sheet
    assert seconds[1] / seconds[0] == pytest.approx(17143 / 13732, rel=0.05)
    # tests/gpu/aot/test_memory.py finds these in the compiled loss.
    assert sizes[1] - sizes[0] == SHAPE.vocab_size * (8 * SHAPE.hidden_size + 6 * 512)


def test_measured_steps_of_the_8b_shape(parts_8b):
    """One H200, benchmarks/results: bf16 base of `8b` in steps.json, NF4 base of memory.json."""
    config = config_8b(model=ModelConfig(path="a shape"))
    parts_bf16 = costs_of(SHAPE, config)
    for parts, text, seconds in (
        (parts_bf16, "keep", 0.944),
        (parts_8b, "keep", 0.952),
        (parts_8b, "recompute", 1.243),
        (parts_8b, "recompute, layer_input=offload", 1.249),
    ):
        predicted = forecast(parts, StepPlan(parse_plan(text, 32, DENSE)[0], 1, 2093), H200).step_seconds
        assert predicted == pytest.approx(seconds, rel=0.03), text


def test_experts_in_mxfp4_are_decoded_beside_their_products_as_those_in_nf4_are():
    """Theirs are stored with the last two axes swapped, as products multiply by them."""
    hf = PUBLISHED["openai/gpt-oss-20b"] | {"num_hidden_layers": 1, "quantization_config": None}

    def decoded(load_in):
        parts = costs_of(config_from_hf(hf), config_8b(model=ModelConfig(path="a shape", load_in=load_in)))
        works = {segment.name: segment.work for segment in parts.layers.segments}
        return {name: (works[name].decoded, works[name].decoded_beside) for name in ("expand", "contract")}

    numbers = 32 * 2880 * 2880
    assert decoded("mxfp4") == decoded("nf4") == {"expand": (0.0, 2 * numbers), "contract": (0.0, numbers)}


@given(st.sampled_from((64, 128, 256)), st.sampled_from((2048, 8192, 65_536)), st.data())
@settings(max_examples=30, deadline=None)
def test_a_window_saves_attention_no_more_than_what_it_hides(head_dim, length, data):
    """A wider window takes longer, and each of a narrow one's keys does; none takes longer than whole documents."""
    windows = sorted(data.draw(st.lists(st.integers(16, length), min_size=2, max_size=2, unique=True)))

    def seconds(window):
        layer = LayerSpec(window=window)
        shape = dataclasses.replace(SHAPE, layers=(layer,), head_dim=head_dim)
        config = config_8b(model=ModelConfig(path="a shape"), data=DataConfig(train="rows", length=length))
        (work,) = (s.work for s in costs_of(shape, config).layers.segments if s.name == "attend")
        return work.attention_flops, work.attention_flops_backward

    narrow, wide, whole = map(seconds, (*windows, None))
    for less, more, most in zip(narrow, wide, whole, strict=True):
        assert less <= more * (1 + 1e-9) and more <= most * (1 + 1e-9)
        seen = [window - (window - 1) * window / (2 * length) for window in windows]
        assert less / seen[0] >= more / seen[1] * (1 - 1e-9)


@pytest.mark.parametrize("load_in", ["mxfp4", "nf4", None])
def test_a_mixer_is_recomputed_after_experts_that_are_decoded_and_do_not_read_it(load_in):
    """As XLA orders them (gpt-oss-120b, 16 rows: 0.6 GB less where `mid` is kept); experts in 16 bits wait for it."""
    hf = PUBLISHED["openai/gpt-oss-20b"] | {"num_hidden_layers": 1, "quantization_config": None}
    parts = costs_of(config_from_hf(hf), config_8b(model=ModelConfig(path="a shape", load_in=load_in)))
    tokens = 16_384
    work = {
        name: layer_forecast(parts, LayerPlan("recompute", mid=name), tokens, H200).work
        for name in ("keep", "recompute")
    }
    sizes = {name: parts.layers.residual_bytes(name, tokens) for name in parts.layers.residuals}
    mixer = sum(sizes[name] for name in ("query", "key", "value", "attention_out", "lse"))
    saved = sizes["mid"] + (mixer if load_in else 0.0)
    assert work["recompute"] - work["keep"] == pytest.approx(saved)
    partly = LayerPlan("recompute", mid="keep", query="keep", key="keep", value="keep")
    less = sizes["query"] + sizes["key"] + sizes["value"] + sizes["mid"]
    assert work["recompute"] - layer_forecast(parts, partly, tokens, H200).work == pytest.approx(less)


def test_forecasts_beside_steps_whose_weights_streamed():
    """benchmarks/results/streamed_once.json: rows of packed documents, of which attention takes less."""
    with planned_for("NVIDIA H200"):
        records = [each for each in forecasts_of_records.measured() if each.name.startswith("streamed_once")]
        assert len(records) == 5
        for record in records:
            row = forecasts_of_records.row_of(record, forecasts_of_records.forecast_of(record, {}))
            assert 0.97 <= row["speed"] <= 1.01 and 1.0 <= row["memory"] <= 1.02, row


@given(st.floats(0.0, 3000.0), st.sampled_from(("recompute", "keep", "recompute, layer_input=offload")))
@settings(max_examples=10, deadline=None)
def test_shorter_documents_need_less_attention(mean, text):
    """Time alone, and not below what rows of documents of a tile take; longer than a row there are none."""
    spec = StepSpec.of(config_8b())
    model = abstract_model(SHAPE, spec.model)

    def of(document_tokens: float | None):
        costs = step_cost(model, dataclasses.replace(spec, document_tokens=document_tokens))
        plan = parse_plan(text, 32, costs.layers.all_residuals)[0]
        return forecast(costs, StepPlan(plan, 1, 1024), H200)

    tiles, some, rows = of(0.0), of(mean), of(None)
    assert tiles.step_seconds <= some.step_seconds <= rows.step_seconds == of(2048.0).step_seconds
    assert 0.9 * rows.step_seconds < tiles.step_seconds < rows.step_seconds
    assert some.parts == rows.parts and some.host_bytes == rows.host_bytes


@pytest.mark.parametrize(
    ("model", "load_in", "plan", "layers", "measured"),
    [
        ("openai/gpt-oss-20b", "mxfp4", "0-18: gate_up=recompute; 19-23: keep", 24, 66.55e-3),
        ("google/gemma-4-12B-it", "nf4", "0-45: gate=recompute, up=recompute; 46-47: keep", 48, 271.53e-3),
    ],
)
def test_measured_products_that_are_computed_again(model, load_in, plan, layers, measured):
    """Their scopes in profiles of 8 x 2,048 tokens: commits_8bf988e.json at 82d6ebf1, precision_once.json."""
    experts = dict(adapter=AdapterConfig(target_parameters=EXPERTS)) if load_in == "mxfp4" else {}
    config = config_8b(model=ModelConfig(path="a shape", load_in=load_in), **experts)
    with planned_for("NVIDIA H200"):
        parts = costs_of(config_from_hf(PUBLISHED[model]), config)
        residuals = parse_plan(plan, layers, parts.layers.all_residuals)[0]
        again = forecast(parts, StepPlan(residuals, 1, 1024), H200).recompute_seconds
    assert again == pytest.approx(measured, rel=0.05)


@pytest.mark.full
def test_measured_steps_with_delta_nets():
    """Qwen3.5-9B in bf16 on one H200, benchmarks/results/steps.json."""
    config = config_8b(model=ModelConfig(path="a shape"))
    parts = costs_of(config_from_hf(PUBLISHED["Qwen/Qwen3.5-9B"]), config)
    kept, made_again = (
        forecast(parts, StepPlan(parse_plan(text, 32, parts.layers.all_residuals)[0], 1, 1081), H200)
        for text in ("keep", "remembered=recompute")
    )
    assert kept.step_seconds == pytest.approx(1.063, rel=0.08)
    # The derivative runs the rule once more whether its result is kept or not.
    assert made_again.step_seconds == kept.step_seconds and made_again.recompute_seconds == 0
    assert kept.peak_bytes / 1e9 == pytest.approx(71.79, rel=0.02)


# ---- what is chosen


def test_with_room_everything_is_kept(parts_8b):
    best = choose(parts_8b, StepSpec.of(config_8b()), H200, 130e9)
    assert best.plan.residuals == ResidualPlan.uniform(KEEP, 32) and best.plan.micro_batches == 1
    assert best.recompute_seconds == best.wait_seconds == best.host_bytes == 0


@pytest.mark.full
def test_less_memory_is_never_faster_and_always_kept_to(parts_8b):
    speeds = []
    for gb in (130, 60, 40, 24, 16, 12, 10, 8.5):
        best = choose(parts_8b, StepSpec.of(config_8b()), H200, gb * 1e9)
        assert best.peak_bytes <= gb * 1e9
        speeds.append(best.tokens_per_second)
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[3] > 0.85 * speeds[0]  # 24 GB: micro-batches keep everything in a quarter of the memory


@pytest.mark.full
def test_a_choice_beats_every_uniform_plan_that_fits(parts_8b):
    for gb, micro in ((24, 1), (16, 1), (16, None)):
        config = config_8b(micro_batches=micro)
        best = choose(parts_8b, StepSpec.of(config), H200, gb * 1e9)
        for plan in layer_plans(parts_8b, True):
            for parts in [micro] if micro else (1, 2, 4, 8):
                other = forecast(parts_8b, StepPlan(ResidualPlan.uniform(plan, 32), parts, 523), H200)
                if other.peak_bytes <= gb * 1e9 and other.host_bytes <= H200.host_bytes:
                    assert best.step_seconds <= other.step_seconds + 1e-3, residuals_text(other.plan.residuals)


def test_offload_is_chosen_where_it_wins_and_never_on_one_memory(parts_8b):
    config = config_8b(micro_batches=1)
    best = choose(parts_8b, StepSpec.of(config), H200, 20e9)
    assert best.host_bytes > 0
    unified = dataclasses.replace(H200, link=0.0, host_bytes=0.0)
    other = choose(parts_8b, StepSpec.of(config), unified, 20e9)
    assert other.host_bytes == 0 and other.step_seconds > best.step_seconds
    assert find_device("NVIDIA GB10").link == 0
    slow = choose(parts_8b, StepSpec.of(config), dataclasses.replace(H200, link=1e8), 20e9)
    assert slow.host_bytes < best.host_bytes


def test_pinned_memory_is_bounded(parts_8b):
    long = parts_8b.reshaped(rows=1, length=65536)
    for host in (10e9, 40e9, 200e9):
        best = choose(long, StepSpec.of(config_8b(rows_per_step=1)), dataclasses.replace(H200, host_bytes=host), 40e9)
        assert best.host_bytes <= host


@pytest.mark.full
def test_what_is_pinned_leaves_room_for_a_checkpoint():
    """A whole 8B on an 80 GB card: beside what it pins, a host of 50 GB holds a copy of the state of 32 GB, or the run
    would be killed when it first saves. Where there is host memory enough, the plan is as before."""
    optim = OptimConfig(name="adamw_8bit")
    config = config_8b(model=ModelConfig(path="a shape"), adapter=None, optim=optim, micro_batches=1)
    parts = costs_of(SHAPE, config)
    saved = parts.saved_bytes
    assert saved == pytest.approx(4 * parts.update.trained, rel=0.02)  # bf16 weights and two moments of 8 bits
    small, large = (
        choose(parts, StepSpec.of(config), dataclasses.replace(H200, host_bytes=35e9, host_memory_bytes=host), 83e9)
        for host in (50e9, 500e9)
    )
    assert small.host_bytes <= 50e9 - saved - 4e9 < large.host_bytes <= 35e9


@pytest.mark.full
def test_gate_and_up_are_in_fp8_where_keeping_them_does_not_fit():
    config = config_8b(model=ModelConfig(path="a shape", load_in="fp8", compute="fp8"), micro_batches=1)
    parts = costs_of(SHAPE, config)
    wide = parts.shape.rows * parts.shape.length * 14336 * parts.shape.num_layers
    keep, in_fp8 = (
        forecast(parts, StepPlan(parse_plan(text, 32, parts.layers.all_residuals)[0], 1, 1024), H200)
        for text in ("keep", "fp8")
    )
    assert keep.parts["kept residuals"] - in_fp8.parts["kept residuals"] == 2 * wide
    assert keep.step_seconds < in_fp8.step_seconds < 1.06 * keep.step_seconds
    # "8b_fp8" in steps.json, as compiled, less the 0.84 GB that plans then counted as lost on loading.
    assert keep.peak_bytes == pytest.approx(62.127e9 - 0.838e9 - (2092 - 1024) * 128_256 * 6, rel=0.005)
    # Beside a host that is fast enough, gate and up stay as they are and others go there.
    unified = dataclasses.replace(H200, link=0.0)
    best = choose(parts, StepSpec.of(config), unified, (keep.peak_bytes + in_fp8.peak_bytes) / 2)
    assert "up=fp8" in residuals_text(best.plan.residuals) and best.step_seconds < in_fp8.step_seconds


def test_what_the_config_fixes_stays(parts_8b):
    best = choose(parts_8b, StepSpec.of(config_8b(memory=MemoryConfig(plan="gate=offload, up=offload"))), H200, 60e9)
    assert residuals_text(best.plan.residuals) == "gate=offload, up=offload"
    assert choose(parts_8b, StepSpec.of(config_8b(micro_batches=4)), H200, 130e9).plan.micro_batches == 4


def test_the_choice_looks_at_few_whole_plans(parts_8b, monkeypatch):
    """Mixtures of two layer plans are weighed by arrays; whole plans are forecast for the best of each split only."""
    tried = []
    real = choice.forecast
    monkeypatch.setattr(choice, "forecast", lambda *a, **k: (tried.append(a[1]), real(*a, **k))[1])
    choose(parts_8b, StepSpec.of(config_8b()), H200, 16e9)
    places, splits, sizes_of_chunks = 2, 4, len(choice.CHUNK_LOGITS)  # the optimizer's states are here or there
    assert 0 < len(tried) <= places * splits * sizes_of_chunks * 2


def test_the_best_pair_for_few_logits_is_the_best_for_more_while_it_fits(parts_8b):
    of_layers, chunks, again = best_layers(parts_8b, 16384, H200, None), (64, 523, 8384), 0
    for gb in (8, 11, 12, 14, 20, 40, 200):
        found = choice._best_pairs(parts_8b, of_layers, 1, chunks, H200, gb * 1e9, None)
        alone = [choice._best_pair(parts_8b, of_layers, 1, chunk, H200, gb * 1e9, None) for chunk in chunks]
        assert found == alone[: len(found)]
        assert len(found) == 3 or min(one.peak_bytes for one in alone) == found[-1].peak_bytes > gb * 1e9
        again += len({one.plan.residuals for one in found}) > 1
    assert again


def test_rows_that_others_beat_are_left_out():
    rows = np.random.default_rng(0).integers(0, 6, (300, 3))
    rows = np.concatenate([rows, 12 - rows.sum(1, keepdims=True) // 2], 1).astype(float)
    kept = [i for i, row in enumerate(rows) if not any((one <= row).all() and (one < row).any() for one in rows)]
    assert residuals._unbeaten(rows) == kept
    assert len({tuple(rows[i]) for i in kept}) < len(kept) < 200  # equal rows stay together


@pytest.mark.full
def test_when_nothing_fits_three_settings_that_would(parts_8b):
    config = config_8b(model=ModelConfig(path="a shape"))
    with pytest.raises(PlanError, match="no plan fits: the smallest needs") as error:
        choose(costs_of(SHAPE, config).without_last_resorts(), StepSpec.of(config), H200, 12e9)
    assert str(error.value).count(" GB;") == 2 and "frozen weights 15.01 GB" in str(error.value)
    loaded = dataclasses.replace(StepSpec.of(config), keeps_model=True)  # of a script, so that nothing streams
    found = fitting.fitting_settings(SHAPE, loaded, H200, 12e9)
    assert len(found) == 2 and found[0] == "model.load_in=nf4"
    tight = fitting.fitting_settings(SHAPE, StepSpec.of(config_8b()), H200, 7.2e9)
    assert len(tight) == 3
    lengths = [int(text.split("=")[1]) for text in tight if text.startswith("data.length")]
    shorter = config_8b(data=DataConfig(train="rows", length=lengths[0]))
    choose(costs_of(SHAPE, shorter), StepSpec.of(shorter), H200, 7.2e9)  # as it says


@st.composite
def full_or_adapted(draw) -> TrainConfig:
    adapter = draw(st.sampled_from((None, AdapterConfig(), AdapterConfig(lora_dropout=0.1))))
    optim = OptimConfig(
        name=draw(st.sampled_from(("adamw", "adamw_8bit", "lion", "muon", "sgd"))),
        weights=None if adapter is not None else draw(st.sampled_from((None, "fp32", "bf16"))),
    )
    hosts = adapter is None and optim.name in HOSTED_OPTIMIZERS and draw(st.booleans())
    source = draw(st.sampled_from((dict(path="a shape"), dict(from_config="a shape")))) if adapter is None else {}
    return make_config(
        "out",
        model=ModelConfig(**source or dict(path="a shape", load_in=draw(st.sampled_from((None, "nf4"))))),
        data=DataConfig(train="rows", length=draw(st.sampled_from((64, 512, 1536)))),
        adapter=adapter,
        optim=dataclasses.replace(optim, offload=hosts),
        max_grad_norm=1.0 if hosts else draw(st.sampled_from((None, 1.0))),
        micro_batches=draw(st.sampled_from((None, 1, 4))),
        memory=MemoryConfig(plan=draw(st.sampled_from((None, "keep")))),
    )


@pytest.mark.full
@settings(max_examples=4, deadline=None)
@given(full_or_adapted(), st.floats(0.2, 0.95))
@example(make_config("out", data=DataConfig(train="rows"), optim=OptimConfig(offload=True)), 0.9)
@example(make_config("out", data=DataConfig(train="rows"), optim=OptimConfig(weights="bf16")), 0.9)
def test_each_change_that_is_advised_is_allowed_and_fits(config, share):
    spec = StepSpec.of(config)
    budget = share * smallest_plan(costs_of(tiny_config(), config), spec, H200).peak_bytes
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(config_to_yaml(config))
        for text in fitting.fitting_settings(tiny_config(), spec, H200, budget):
            if not text.startswith("a card of "):
                changes = re.split(r" (?=[a-z_.]+=)", re.sub(r" \(.*", "", text))
                changed = load_config(str(recipe), changes)
                choose(costs_of(tiny_config(), changed), StepSpec.of(changed), H200, budget)


@pytest.mark.full
def test_the_longest_row_fits_and_the_next_does_not(parts_8b):
    config = config_8b()
    longest = fitting.longest_row(parts_8b, StepSpec.of(config), H200, 24e9)
    assert longest % 1024 == 0 and longest > 16384
    one = config_8b(rows_per_step=1, micro_batches=1)
    choose(parts_8b.reshaped(rows=1, length=longest), StepSpec.of(one), H200, 24e9)
    with pytest.raises(PlanError):
        choose(parts_8b.reshaped(rows=1, length=longest + 1024), StepSpec.of(one), H200, 24e9)


def test_the_longest_row_fits_the_host_too(parts_8b):
    """A fixed plan that offloads reaches the end of the host's memory before that of the device's."""
    card, config = find_device("RTX 4090"), config_8b(memory=MemoryConfig(plan="offload"))
    longest = fitting.longest_row(parts_8b, StepSpec.of(config), card, 1e12, step=4096)
    one = config_8b(memory=config.memory, rows_per_step=1, micro_batches=1)
    fitting_row = choose(parts_8b.reshaped(rows=1, length=longest), StepSpec.of(one), card, 1e12)
    assert 0 < fitting_row.host_bytes <= card.host_bytes
    with pytest.raises(HostError, match="plan.host_gb"):
        choose(parts_8b.reshaped(rows=1, length=longest + 4096), StepSpec.of(one), card, 1e12)


@pytest.mark.full
def test_whether_a_row_fits_is_known_of_most_without_choosing(parts_8b):
    config, sure = config_8b(rows_per_step=1, micro_batches=1), []
    for device in (H200, dataclasses.replace(H200, host_bytes=2e9), find_device("NVIDIA GB10")):
        for length in (8192, 32768, 65536, 131072, 262144, 524288):
            row = parts_8b.reshaped(rows=1, length=length)
            sure.append(fitting._surely_fits(row, StepSpec.of(config), device, 24e9))
            try:
                choose(row, StepSpec.of(config), device, 24e9, choice.CHUNK_LOGITS[-1:])
                assert sure[-1] is not False
            except PlanError:
                assert not sure[-1]
    assert {True, False} <= set(sure) and sure.count(None) <= 2


# ---- devices


def test_devices_say_how_they_are_known(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    assert find_device("NVIDIA H200").note == "measured"
    card = find_device("RTX 4090")
    assert card.note.startswith("not measured") and card.memory_bytes == 24 * 2**30 - CONTEXT_BYTES
    assert card.gemm == pytest.approx(165.2e12 * 680 / 989)
    with pytest.raises(ValueError, match="plan.device = 'RTX 1': not a device that is known; known: .*RTX 4090"):
        find_device("RTX 1")
    with pytest.raises(ValueError, match=r"plan.device = 'Tesla T4': T4 is older than compute capability 8.0"):
        find_device("Tesla T4")
    with pytest.raises(ValueError, match="this GPU = 'Tesla V100-SXM2-32GB': V100 is older"):
        find_device("Tesla V100-SXM2-32GB", 30e9)
    with pytest.raises(ValueError, match="did you mean RTX 4060"):
        find_device("RTX 4065")
    assert data_sheet("NVIDIA A100-SXM4-40GB").memory_gib == 40 and data_sheet("NVIDIA A100-SXM4-80GB").memory_gib == 80


@pytest.mark.parametrize("name", known_devices())
def test_every_device_of_the_list_can_be_named_as_its_owner_does(name, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    sheet = DATA_SHEETS[name]
    assert data_sheet(name) is data_sheet(name.lower()) is data_sheet(f"NVIDIA GeForce {name}") is sheet
    assert sheet.bf16_tflops > sheet.fp32_tflops
    assert sheet.fp8_tflops is None or sheet.fp8_tflops == pytest.approx(2 * sheet.bf16_tflops, rel=0.02)
    device = find_device(name)
    assert 6e9 < device.memory_bytes < 200e9 and device.host_bytes > 0


@pytest.mark.parametrize(
    "kind", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "A new one"]
)
def test_a_device_that_is_here_and_unknown_is_planned_for_and_said_to_be(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    device = find_device(kind, 15e9)
    assert device.memory_bytes == 15e9 and "jaxtune profile ceilings` measures them" in device.note
    with pytest.raises(ValueError, match="not a device that is known"):
        find_device(kind)


def test_the_host_of_a_device_that_is_not_here(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    small, card, server = (find_device(name).host_bytes for name in ("RTX 3060", "RTX 4090", "H200"))
    assert small < card < server
    assert find_device("RTX 3060", host_gb=128).host_bytes == pytest.approx(128e9 * 0.7)


@pytest.mark.full
def test_a_plan_that_needs_more_than_the_usual_host_warns(parts_8b):
    def said(device):
        parts = parts_8b.limited({"embeddings": (0, 0)})  # so that the plan offloads little enough for the card
        best = choose(parts, StepSpec.of(config_8b()), device, 7e9)
        assert best.host_bytes > 10e9
        console = terminal.console(file=io.StringIO(), width=80, soft_wrap=True)
        plan_text.plan_elsewhere(best, parts, device, 7e9, 1024, 1024, console)
        return console.file.getvalue()

    card = find_device("RTX 4070", host_gb=256)
    assert "host memory: 256 GB (plan.host_gb), of which 70% may be pinned" in said(card)
    assert "warning" not in said(card)
    assert "warning: the plan pins" in said(dataclasses.replace(card, usual_host_bytes=5e9))
    with pytest.raises(ValueError, match="plan.host_gb = 64.*set plan.device too"):
        PlanConfig(host_gb=64)


@pytest.mark.full
def test_a_plan_for_a_device_that_is_not_here(capsys):
    assert cli.main(["train", "qlora-8b", "--plan", "plan.device=RTX 4090", "plan.dollars_per_hour=36"]) == 0
    text = capsys.readouterr().out
    longest = "longest single row that fits: "
    for words in ("plan: ", "predicted peak", "tokens/s", "not measured", longest, "131,072 positions (model.rope"):
        assert words in text, words
    speed = float(re.search(r"([\d,]+) tokens/s", text)[1].replace(",", ""))
    price = float(re.search(r"a million tokens take [\d:]+, for ([\d.]+) dollars, evaluations", text)[1])
    assert price == pytest.approx(1e6 / speed / 100, rel=1e-2)  # a cent a second


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "load_in"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "fp8"),
    ],
)
def test_a_plan_of_a_checkpoint_that_is_quantised(tmp_path, capsys, config, load_in):
    def plan(name, hf, load_in):
        (tmp_path / name).write_text(json.dumps(hf), encoding="utf-8")
        changes = [f"model.path={tmp_path / name}", f"model.load_in={load_in}", "plan.device=RTX 4090"]
        assert cli.main(["train", "qlora-8b", "--plan", *changes]) == 0
        return capsys.readouterr().out

    shape = PUBLISHED["meta-llama/Llama-3.1-8B"] | {"num_hidden_layers": 2}
    stored = plan("few_bits.json", shape | {"quantization_config": config}, "null")
    assert stored == plan("bits.json", shape, load_in) != plan("bits.json", shape, "null")


def test_the_time_to_finish_and_its_price():
    step = SimpleNamespace(step_seconds=0.5, tokens_per_second=1000.0)
    assert plan_text.finish_line(step, 7200, None) == "7,200 steps take 1:00:00, evaluations and saves not counted"
    assert "take 1:00:00, for 8.00 dollars," in plan_text.finish_line(step, 7200, 2.0, devices=4)
    assert plan_text.finish_line(step, 7200, None, samples=True).endswith(
        " take 1:00:00, sampling, evaluations and saves not counted"
    )
    assert plan_text.finish_line(step, None, 3.6).startswith("a million tokens take 16:40, for 1.00 dollars,")
    with pytest.raises(ValueError, match="plan.dollars_per_hour = 0"):
        PlanConfig(dollars_per_hour=0.0)


@pytest.mark.full
def test_a_plan_of_a_model_with_experts(capsys):
    assert cli.main(["train", "gpt-oss-20b-qlora", "--plan", "plan.device=RTX 4090"]) == 0
    text = capsys.readouterr().out
    for words in ("gate_up", "choice", "taken to run at 95% of dense ones"):
        assert words in text, words


@pytest.mark.full
def test_a_plan_for_a_device_that_is_too_small(capsys):
    small = ["plan.device=RTX 3090", "memory.budget_gb=22"]
    assert cli.main(["train", "full-1b", "--plan", *small]) == cli.USER_ERROR
    text = capsys.readouterr().err
    assert "no plan fits" in text and "What would fit: optim.name=adamw_8bit; " in text
    assert cli.main(["train", "qlora-8b", "--plan"]) == cli.USER_ERROR
    assert "plan.device is not set, and this machine has no GPU" in capsys.readouterr().err


# ---- a run


@pytest.mark.full
def test_a_budget_is_planned_for_and_the_losses_are_those_of_the_kept_plan(tmp_path, monkeypatch, capsys):
    config, model = tiny_budget(tmp_path / "small")
    data = dataset(documents(60))
    # On the tiny model the compiler's own constants outweigh what is planned; its check has tests of its own.
    monkeypatch.setattr(Planner, "compiled_bytes", lambda self, *programs: 0.0)
    small = Trainer(model, None, config, data)
    assert small.planner.plan != StepPlan(ResidualPlan.uniform(KEEP, 2), 1, 128)
    kept = Trainer(model, None, dataclasses.replace(config, memory=MemoryConfig(), output=str(tmp_path / "kept")), data)
    assert kept.planner.plan.residuals == ResidualPlan.uniform(KEEP, 2) and kept.planner.plan.micro_batches == 1
    small.train(), kept.train()
    np.testing.assert_allclose(
        [line["loss"] for line in small.history], [line["loss"] for line in kept.history], rtol=1e-5
    )
    assert "plan: " in capsys.readouterr().err


@pytest.mark.full
def test_a_resumed_run_keeps_its_plan(tmp_path, monkeypatch, capsys):
    from jaxtune.train.config import CheckpointConfig

    monkeypatch.setattr(Planner, "compiled_bytes", lambda self, *programs: 0.0)
    config, model = tiny_budget(tmp_path, checkpoint=CheckpointConfig(every_steps=2, every_minutes=None))
    data = dataset(documents(60))
    first = Trainer(model, None, config, data)
    assert first.planner.plan.residuals != ResidualPlan.uniform(KEEP, 2) or first.planner.plan.micro_batches > 1
    first.train()
    longer = dataclasses.replace(config, memory=MemoryConfig())  # a larger device: a choice anew would keep everything
    again = Trainer(model, None, longer, data)
    assert again.planner.plan != first.planner.plan
    again.train()
    assert again.planner.plan == first.planner.plan
    fixed = Trainer(model, None, dataclasses.replace(longer, memory=MemoryConfig(plan="recompute")), data)
    fixed.train()
    assert residuals_text(fixed.planner.plan.residuals) == "recompute"
    assert "not bit for bit the same run: numerics.residuals" in capsys.readouterr().out


def test_predicted_stands_beside_measured():
    from types import SimpleNamespace

    from jaxtune.train.planning.plan_text import measured_lines

    plan = SimpleNamespace(peak_bytes=23.1e9, tokens_per_second=15_900.0, tokens=16384)
    assert measured_lines(plan, H200, [1.0, 1.024], 23_500_000_000) == [
        "plan: peak 23.10 GB predicted, 23.50 measured; 15,900 tokens/s predicted, 16,190 measured"
    ]
    assert measured_lines(plan, H200, [], 23_500_000_000) == ["plan: peak 23.10 GB predicted, 23.50 measured"]
    [line] = measured_lines(plan, H200, [], 23_500_000_000, in_steps=False)
    assert line == "plan: peak 23.10 GB predicted, at most 23.50 measured"  # XLA took as much to choose products
    assert measured_lines(plan, find_device("cpu"), [1.0], 1) == []


def test_tiny_shapes_have_a_cost_too():
    parts = costs_of(tiny_config(), make_config("out"))
    assert parts.shape.num_layers == 2 and parts.head.trains  # without an adapter everything trains
    assert parts.layers.cast_bytes == 0  # fp32 compute needs no copies of fp32 masters


def test_the_host_memory_of_a_container_or_job_is_what_its_group_allows(monkeypatch, tmp_path):
    """The least of the groups around the process, of both versions of cgroups; and the plan says so."""
    own, groups = tmp_path / "own", tmp_path / "groups"
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", own)
    monkeypatch.setattr(host_memory, "_GROUPS", groups)
    monkeypatch.setattr(host_memory, "machine_bytes", lambda: 256 * 10**9)
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)  # what another test let XLA pin
    assert host_memory.size_bytes() == 256e9 and find_device("NVIDIA H200", 140e9).host_note == ""
    (groups / "job" / "step").mkdir(parents=True)
    own.write_text("0::/job/step\n")
    (groups / "job" / "step" / "memory.max").write_text("max\n")
    (groups / "job" / "memory.max").write_text("64000000000\n")
    assert host_memory.size_bytes() == 64e9
    device = find_device("NVIDIA H200", 140e9)
    assert device.host_bytes == 0.7 * 64e9 and device.host_memory_bytes == 64e9
    assert device.host_note == (
        "64.0 GB (the limit of this container or job; the machine has 256.0 GB), of which 70% may be pinned"
    )
    parts = costs_of(tiny_config(), make_config("out"))
    lines = plan_text.plan_lines(choose(parts, StepSpec.of(make_config("out")), device, 83e9), parts, device, 83e9)
    assert lines[-1].startswith("  host memory: 64.0 GB (the limit of this container or job; ")
    own.write_text("12:pids:/x\n4:cpu,memory:/docker/1\n")
    (groups / "memory").mkdir()  # a container whose own group is shown as the root
    (groups / "memory" / "memory.limit_in_bytes").write_text("32000000000\n")
    assert host_memory.size_bytes() == 32e9
    (groups / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # not limited
    assert host_memory.size_bytes() == 256e9


def test_pinned_memory_is_what_xla_may_pin(monkeypatch):
    monkeypatch.setattr(host_memory, "size_bytes", lambda: 200e9)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")  # so that it is put back
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    assert find_device("NVIDIA H200", 140e9).host_bytes == 61 * 2**30  # XLA pins 64, of which loading takes some
    host_memory.allow_pinned()
    assert find_device("NVIDIA H200", 140e9).host_bytes == 0.7 * 200e9
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "500")
    host_memory.allow_pinned()
    assert find_device("NVIDIA H200", 140e9).host_bytes == 0.7 * 200e9


def test_what_is_pinned_leaves_room_for_the_copy_of_a_save(parts_8b):
    """XLA's pool takes the power of two above what a step pins, and keeps it while a state of 32 GB is copied."""
    assert [devices.pool_bytes(size) for size in (0.0, 1.0, 2.0**34, 19.4e9)] == [0.0, 1.0, 2.0**34, 2.0**35]
    for memory, most in ((math.inf, 45e9), (128e9, 45e9), (64e9, 2.0**34), (40e9, 2.0**31), (35e9, 0.0), (20e9, 0.0)):
        device = dataclasses.replace(H200, host_memory_bytes=memory, host_bytes=min(0.7 * memory, 45e9))
        parts = dataclasses.replace(
            parts_8b, fixed=parts_8b.fixed | {"optimizer states": 32e9 - parts_8b.trained_bytes}
        )
        found = beside_moved(parts, device).host_bytes
        assert found == most and memory >= devices.pool_bytes(found) + (36e9 if found else 0)


def test_the_devices_of_a_host_share_its_memory(monkeypatch):
    """Whether one process has them all, or each process has one: together they never plan to pin more than there is."""
    monkeypatch.setattr(host_memory, "size_bytes", lambda: 400e9)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "260")
    for sharing in ((8, 8), (8, 1), (2, 2), (1, 1)):
        each = find_device("NVIDIA H200", 140e9, sharing=sharing).host_bytes
        assert each == pytest.approx(min(0.7 * 400e9 / sharing[0], 257 * 2**30 / sharing[1]))
        assert each * sharing[0] <= 0.7 * 400e9 * (1 + 1e-9)
    assert devices.devices_here(4) == (4, 4)
    monkeypatch.setattr(devices.processes, "all_of", lambda value: [value, value, ["another host", 4]])
    assert devices.devices_here(4) == (8, 4)


def test_eight_devices_plan_to_pin_no_more_than_their_share(parts_8b):
    """8B NF4 over data=8 on a machine whose memory is short: what each device offloads fits its share of it."""
    eight = parts_8b.reshaped(rows=64, devices=8)
    config = config_8b(rows_per_step=64)
    share = dataclasses.replace(H200, host_bytes=45e9 / 8)
    found = choose(eight, StepSpec.of(config), share, 12e9)
    assert 0 < found.host_bytes <= 45e9 / 8
