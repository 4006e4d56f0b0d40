"""A movable says what it is in one file, and the rest follows: it is chosen, forecast, written in plans and records,
placed and told; at length of the frozen weights that stream."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.models.adapters.merge import merge_bytes
from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.lora import matrices
from jaxtune.models.placement.streams import PINNED, streamed_layers
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, PLACEMENTS, LayerPlan, ResidualPlan
from jaxtune.system import host_memory
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxtune.train.folder.translations import section, translated
from jaxtune.train.log.metrics import duration
from jaxtune.train.planning import devices, movables, phases
from jaxtune.train.planning.choice import PlanError, choose
from jaxtune.train.planning.cost import StepCost, abstract_model, step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import STREAMED, forecast, pass_seconds, streamed_bytes
from jaxtune.train.planning.forward import ForwardPlanner
from jaxtune.train.planning.host_room import places
from jaxtune.train.planning.plan import StepPlan, parse_plan
from jaxtune.train.planning.plan_text import pass_lines, plan_lines
from jaxtune.train.planning.planner import Planner
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import assert_same, dataset, documents, lora_model, make_config

H200 = dataclasses.replace(find_device("H200"), host_memory_bytes=256e9, host_bytes=150e9)
CONFIG = TrainConfig(
    model=ModelConfig(path="a shape"),
    data=DataConfig(train="rows", length=2048),
    adapter=AdapterConfig(),
    rows_per_step=8,
    micro_batches=1,
    steps=9,
)


@functools.cache
def model_8b():
    return abstract_model(config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"]), StepSpec.of(CONFIG).model)


@functools.cache
def costs_of(fsdp: int = 1) -> StepCost:
    return step_cost(model_8b(), StepSpec.of(dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=fsdp))))


def streaming() -> StepCost:
    return step_cost(model_8b(), StepSpec.of(CONFIG))


# ---- frozen weights that stream


def test_it_is_chosen_where_nothing_else_fits_and_no_more_of_it_than_needed():
    costs, device, levels = streaming(), dataclasses.replace(H200, link=5e9), []  # a link that hides little
    assert choose(costs, StepSpec.of(CONFIG), device, None).plan.level("streamed") == 0
    for budget in (14e9, 11e9, 7e9):
        with pytest.raises(PlanError):
            choose(costs.limited({"streamed": (0, 0)}), StepSpec.of(CONFIG), device, budget)
        best, layer = choose(costs, StepSpec.of(CONFIG), device, budget), max(costs.movables["streamed"].layer_bytes)
        levels.append(best.plan.level("streamed"))
        assert best.peak_bytes <= budget and layer <= best.parts[STREAMED] <= 2 * layer
        assert f"  weights of {levels[-1]} layers stream from the host (" in "\n".join(
            plan_lines(best, costs, device, budget)
        )
        fewer = forecast(costs, best.plan.at(streamed=levels[-1] - 1), device)
        assert fewer.peak_bytes > budget or fewer.step_seconds >= best.step_seconds
    assert 0 < levels[0] <= levels[1] <= levels[2] <= 32 and levels[0] < levels[2]


def test_the_next_layers_weights_arrive_at_a_backwards_end():
    costs, streamed = streaming(), streaming().movables["streamed"]
    costs, layer = costs.placed({"streamed": 32}), max(streamed.layer_bytes)
    fast, slow, none = (dataclasses.replace(H200, link=link) for link in (4 * layer, layer / 4, 0.0))
    piece = streamed.one_piece * layer
    assert piece == 2 * 4096 * 14336
    assert streamed_bytes(costs, layer, 1.0, fast) == (layer, layer, 1.25 * layer)
    assert streamed_bytes(costs, layer, 0.4, fast) == (layer, layer, 1.625 * layer + piece)
    assert streamed_bytes(costs, layer / 4, 1.0, slow) == (layer, 1.75 * layer, 2 * layer)
    assert streamed_bytes(costs, 0.0, 1.0, none) == (layer, 2 * layer, 2 * layer)
    of_experts = dataclasses.replace(streamed, one_piece=0.6)
    early = dataclasses.replace(streaming(), movables={**streaming().movables, "streamed": of_experts})
    assert streamed_bytes(early.placed({"streamed": 32}), layer, 1.0, fast)[2] == 2 * layer
    alone = streaming().placed({"streamed": 1})
    assert streamed_bytes(alone, layer, 1.0, slow)[2] == layer
    assert streamed_bytes(streaming(), 0.0, 1.0, fast) == (0.0, 0.0, 0.0)


def test_residuals_and_weights_share_the_link():
    """A step takes at least what the link needs: in the forward, where they pass each other, for the larger, in the
    backward for both; and what one of them leaves free costs nothing."""
    costs, rate = streaming(), 55e9
    device = dataclasses.replace(H200, link=rate)
    model = costs.layers.all_residuals

    def of(text: str, link: float = rate):
        plan, moved = parse_plan(text, 32, model)
        return forecast(costs, StepPlan(plan, 1, 1024, moved), dataclasses.replace(device, link=link))

    kept, streams, offloads, both = map(of, ("keep", "keep; streamed=32", "offload", "offload; streamed=32"))
    size, hosted = sum(costs.movables["streamed"].layer_bytes), offloads.host_bytes
    assert streams.wait_seconds == kept.wait_seconds == 0 and both.wait_seconds > offloads.wait_seconds
    for each, bytes_, copied in (
        (streams, size, 2 * size),
        (both, size + hosted, max(size, hosted) + size + hosted),
    ):
        assert each.host_bytes == pytest.approx(bytes_) and each.step_seconds > copied / rate * 0.99
    slow = of("keep; streamed=32", 10e9)
    assert slow.wait_seconds > 0 and slow.step_seconds > 2 * size / 10e9


@given(st.floats(2e9, 90e9), st.integers(1, 8), st.sampled_from((512, 2048, 8192)))
@settings(max_examples=25)
def test_a_pass_without_a_backward_takes_what_its_products_or_the_link_need(link, rows, length):
    costs, device = streaming().reshaped(rows=rows, length=length), dataclasses.replace(H200, link=link)
    residuals, _ = parse_plan("recompute", 32, costs.layers.all_residuals)
    stays, streams = StepPlan(residuals, 1, 1024), StepPlan(residuals, 1, 1024, {"streamed": 32})
    products, both = (pass_seconds(costs, plan, device) for plan in (stays, streams))
    size = sum(costs.movables["streamed"].layer_bytes)
    assert max(products, size / link) <= both <= products + 1.1 * size / link
    assert pass_seconds(costs, stays, dataclasses.replace(device, link=1e9)) == products
    again = dataclasses.replace(costs, reference_runs=1)  # of a frozen model in each loss
    with_reference, without = (forecast(each, streams, device).device_seconds for each in (again, costs))
    assert with_reference - without == pytest.approx(both)
    (line,) = pass_lines(streams, costs, device, {"the reference's": 0, "an evaluation's": 3 * rows})
    by = "the link" if size / link > both * 0.9 else "products"
    speed = rows * length / both
    assert line.startswith(
        f"  a pass without a backward makes {speed:,.0f} tokens/s, bound by {by}: an evaluation's over"
    )
    assert line.endswith(f" {3 * rows:,} rows {duration(3 * both)}")
    assert not pass_lines(stays, costs, device, {"an evaluation's": 3}) + pass_lines(streams, costs, device, {"": 0})


@given(st.floats(5e9, 40e9), st.floats(5e9, 60e9))
@settings(max_examples=8)
def test_a_forward_pass_streams_where_the_weights_do_not_fit(memory, host):
    device = dataclasses.replace(H200, memory_bytes=memory, host_memory_bytes=host, host_bytes=0.7 * host)
    planner = ForwardPlanner(model_8b(), StepSpec.of(dataclasses.replace(CONFIG, micro_batches=None)), device)
    level = planner.plan.level("streamed")
    rooms = [planner._room(plan) - planner.working_bytes(plan) for plan in planner._plans]
    chosen = planner._plans.index(planner.plan)
    assert all(room < 0 for room in rooms[:chosen]) and (rooms[chosen] >= 0 or chosen == len(rooms) - 1)
    moved = sum(costs_of().movables["streamed"].layer_bytes[index] for index in streamed_layers(level, 32))
    assert moved <= max(min(0.7 * host, host - 4e9), 0.0)
    assert planner.weight_bytes == pytest.approx(planner._all_bytes - moved)
    lines = planner.lines(12)
    assert [f"weights of {level} layers stream" in line for line in lines] == [True, False][: 2 * bool(level)]
    least = ForwardPlanner(model_8b(), planner_spec("recompute; streamed=5"), device).plan
    assert least.level("streamed") == 5


class Card:
    platform, device_kind = "gpu", "NVIDIA H200"

    def memory_stats(self):
        return {"bytes_limit": 24e9}


@given(st.integers(8, 64), st.floats(40e9, 200e9), st.lists(st.floats(1e8, 4e9), min_size=2, max_size=3))
@settings(max_examples=8)
def test_what_failed_steps_pinned_is_not_planned_again(pool_gib, host, lacked):
    with pytest.MonkeyPatch.context() as patches:
        patches.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(pool_gib))
        patches.setattr(host_memory, "size_bytes", lambda: host)
        config = dataclasses.replace(CONFIG, rows_per_step=8, micro_batches=1)
        try:
            planner = Planner(model_8b(), StepSpec.of(config), Card())
            pool, pinned = planner.device.host_bytes, planner.residual_host_bytes
            for short in lacked:
                planner.replan("it ran out", None, lambda line: None, placed=True, short_bytes=short, ran=True)
                pinned += planner.residual_host_bytes
        except PlanError:
            return
        assert pinned + planner.cost.moved.pinned_bytes <= pool * 1.001


@given(st.floats(5e9, 40e9), st.floats(1e8, 1e12))
@settings(max_examples=8)
def test_a_smaller_forward_pass_has_the_weights_where_they_lie(memory, need):
    device = dataclasses.replace(H200, memory_bytes=memory)
    planner = ForwardPlanner(model_8b(), StepSpec.of(dataclasses.replace(CONFIG, micro_batches=None)), device)

    class Program:
        def memory_analysis(self):
            return types.SimpleNamespace(temp_size_in_bytes=need)

    moved, plans = planner.plan.moved, [planner.plan]
    while planner.smaller(Program()):
        assert planner.plan.moved == moved and planner.plan not in plans
        plans.append(planner.plan)
    assert need <= planner._room(planner.plan) or planner.plan.micro_batches == CONFIG.rows_per_step


def planner_spec(plan: str) -> StepSpec:
    return StepSpec.of(dataclasses.replace(CONFIG, memory=MemoryConfig(plan=plan)))


@pytest.mark.parametrize("adapters", [["down_proj"], ["q_proj"]])
def test_a_merge_has_what_streams_on_the_device_too(adapters):
    """A matrix beside its merge; one without an adapter is copied alone."""
    config = dataclasses.replace(
        CONFIG, adapter=AdapterConfig(target_modules=adapters), model=ModelConfig(path="shape")
    )
    model = abstract_model(config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"]), StepSpec.of(config).model)
    stays, streams = (
        merge_bytes(phases._streaming(model, StepPlan(ResidualPlan.uniform(KEEP, 32), 1, 1024, moved)))
        for moved in ({}, {"streamed": 32})
    )
    assert stays == merge_bytes(model) and streams[1] == stays[1]
    sizes = {name.split(".")[-1]: 2 * math.prod(matrix.sizes) for name, matrix in matrices(model)}
    assert streams[0] == max(stays[0] + sizes[adapters[0]], sizes["down_proj"])


def test_a_host_without_room_or_link_gets_none():
    costs = streaming()
    for device in (dataclasses.replace(H200, host_memory_bytes=6e9), dataclasses.replace(H200, link=0.0)):
        assert not any(placed.level("streamed") for placed in places(costs, device))
    half = dataclasses.replace(H200, host_memory_bytes=16e9)
    assert {placed.level("streamed") for placed in places(costs, half)} == {0, 8, 16}


@given(st.integers(0, 32), st.sampled_from(("keep", "recompute", "offload")), st.floats(4e9, 60e9))
@settings(max_examples=20)
def test_a_plan_of_the_config_over_the_host_is_refused(level, residuals, host):
    costs, device = streaming(), dataclasses.replace(H200, host_memory_bytes=host, host_bytes=0.7 * host)
    text = f"{residuals}; streamed={level}" if level else residuals
    fixed = StepSpec.of(dataclasses.replace(CONFIG, memory=MemoryConfig(plan=text)))
    plan, moved = parse_plan(text, 32, costs.layers.all_residuals)
    needed = forecast(costs, StepPlan(plan, 1, 1024, moved), device).host_bytes
    beside = 4e9 + costs.saved_bytes
    if min(devices.pool_bytes(needed), 0.7 * host) + beside > host or needed > 0.7 * host:
        if needed:
            words = rf"memory.plan = '{text}' pins {needed / 1e9:.1f} GB of host memory, of which .* have fewer layers"
            with pytest.raises(ValueError, match=words):
                choose(costs, fixed, device, None)
            return
    best = choose(costs, fixed, device, None)
    assert best.plan.text == text and best.host_bytes == needed


def test_its_word_is_read_written_and_refused():
    residuals = costs_of().layers.all_residuals
    plan = StepPlan(*parse_plan("recompute; tile=512; streamed=3", 32, residuals)[:1], 2, 64, {"streamed": 3})
    assert plan.text == "recompute; tile=512; streamed=3"
    assert StepPlan.from_record(json.loads(json.dumps(plan.to_record())), 32, residuals) == plan
    with pytest.raises(ValueError, match="memory.plan = .*streamed=33 is more than the model's 32 layers"):
        parse_plan("keep; streamed=33", 32, residuals)
    fixed = dataclasses.replace(CONFIG, memory=MemoryConfig(plan="keep; streamed=5"))
    assert choose(streaming(), StepSpec.of(fixed), H200, None).plan.text == "keep; streamed=5"


def test_a_run_with_it_is_the_same_run_and_goes_on(tmp_path):
    """Its last layer's frozen weights lie on the host, the given model's, too, as each is in memory once."""
    changes = dict(
        adapter=AdapterConfig(r=4, lora_alpha=8),
        steps=4,
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=3),
    )

    def trainer_of(folder: str, plan: str | None) -> Trainer:
        config = make_config(tmp_path / folder, memory=MemoryConfig(plan=plan), **changes)
        return Trainer(lora_model("float32", layers=2), None, config, dataset(documents(16)), keeps_model=False)

    moved, plain = trainer_of("moved", "keep; streamed=1"), trainer_of("plain", "keep")
    want = plain.train()
    assert_same(want, moved.train())
    assert any("  weights of 1 layers stream from the host" in line for line in moved.planner.lines())
    for layer, kind in ((0, "device"), (1, PINNED)):
        for model in (moved.model.given, plain.model.given):
            weight = model.layers[layer].mixer.q_proj.weight.get_value()
            assert weight.sharding.memory_kind == ("device" if model is plain.model.given else kind)
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "step_00000004")
    again = trainer_of("moved", None)
    assert_same(want, again.train())
    assert again.planner.plan.level("streamed") == 1 and len(again.history) == 2


# ---- all of them


PLACED = st.sampled_from(PLACEMENTS)


@st.composite
def plans(draw) -> StepPlan:
    residuals = costs_of().layers.all_residuals
    count = draw(st.integers(1, 6))

    def layer() -> LayerPlan:
        named = {r.name: draw(PLACED) for r in residuals if r.recomputable and draw(st.booleans())}
        return LayerPlan(draw(st.sampled_from(("keep", "recompute"))), **{n: p for n, p in named.items() if p != "fp8"})

    layers = tuple(layer().resolved(residuals) for _ in range(count))
    moved = {
        w: draw(st.integers(0, count if m.counted else 1)) for w, m in movables.MOVABLES.items() if w != "residuals"
    }
    tile = draw(st.none() | st.integers(1, 9999))
    return StepPlan(ResidualPlan(layers, tile), draw(st.integers(1, 64)), draw(st.integers(1, 9999)), moved)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_a_plan_is_read_as_it_was_recorded(plan):
    residuals = costs_of().layers.all_residuals
    record = json.loads(json.dumps(plan.to_record()))
    assert StepPlan.from_record(record, len(plan.residuals.layers), residuals) == plan


@pytest.mark.parametrize(
    ("record", "moved"),
    [
        ({}, {}),
        ({"embeddings": "host", "optimizer_states": "host"}, {"embeddings": 1, "optimizer_states": 1}),
        ({"per_layer_embeddings": "host"}, {"embeddings": 1}),
        ({"transposed_codes": "device", "embeddings": "device"}, {"transposed_codes": 1}),
        ({"residuals": "recompute; whole=2; resident=6"}, {"whole": 2, "resident": 6}),
        ({"residuals": "recompute; resident=6; tile=64; whole=2", "a later word": 3}, {"whole": 2, "resident": 6}),
    ],
)
def test_records_of_older_versions(record, moved):
    record = {"residuals": "recompute", "micro_batches": 4, "chunk_tokens": 523} | record
    recorded = section(translated({"numerics": record}), "numerics")
    plan = StepPlan.from_record(recorded, 32, costs_of().layers.all_residuals)
    assert plan.moved == moved and plan.micro_batches == 4 and plan.chunk_tokens == 523
    assert plan.residuals.layers == (LayerPlan("recompute"),) * 32


@given(st.lists(st.integers(0, 32), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_bytes_depend_on_the_level_and_not_on_the_way_there(levels):
    costs = costs_of(2)
    for level in levels:
        costs = costs.placed({"resident": level, "whole": level})
    straight = costs_of(2).placed({"resident": level, "whole": level})
    assert costs.divided == straight.divided and costs.moved == straight.moved
    assert costs.fixed == pytest.approx(straight.fixed)


def test_an_option_says_what_placing_adds():
    for costs in (costs_of(), costs_of(2)):
        options = [(m, option) for m in costs.movables.values() if m.able for option in m.options(costs, H200)]
        assert options
        for movable, option in options:
            placed = costs.placed({movable.word: option.level})
            assert placed.fixed_bytes(1) - costs.fixed_bytes(1) == option.device_bytes
            host = placed.moved.pinned_bytes + placed.moved.pageable_bytes
            assert host == option.pinned_bytes + option.pageable_bytes
            assert movable.side != "host" or host > 0 > option.device_bytes
