"""The mesh of a run whose config names none."""

import dataclasses
import re
import types

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.registry import config_from_hf
from jaxtune.system import processes
from jaxtune.train.config import (
    AdapterConfig,
    ConfigError,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
)
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import RunNeeds
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.planning import devices, meshes
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.host_room import HostError
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec import checks

SMALL = PUBLISHED["Qwen/Qwen2.5-0.5B-Instruct"] | {"num_hidden_layers": 4}
LARGE = PUBLISHED["meta-llama/Llama-3.1-8B"] | {"num_hidden_layers": 16}


def chosen(hf, device, count, objective=None, **settings):
    """(mesh, why) of a full fine-tuning of 16-bit weights; objective: None: the config's."""
    settings = dict(rows_per_step=8, micro_batches=1, optim=OptimConfig("adamw_8bit")) | settings
    config = TrainConfig(
        model=ModelConfig(path="x"), data=DataConfig(train="x", length=512), steps=1, output="x", **settings
    )
    model = abstract_model(config_from_hf(hf), StepSpec.of(config).model)
    device = devices.find_device(device) if isinstance(device, str) else device
    spec = StepSpec.of(config, objective)

    def cost_on(mesh):
        return step_cost(model, dataclasses.replace(spec, mesh=mesh))

    return meshes.choose_mesh(cost_on, spec, device, devices.budget(config.memory, device), count)


def test_what_fits_each_device_is_not_divided():
    mesh, why = chosen(SMALL, "H200", 2)
    assert mesh == MeshConfig(2, 1)
    assert why.startswith("mesh: data=2 fsdp=1, ") and "; data=1 fsdp=2 " in why


def test_what_does_not_fit_one_device_is_divided():
    mesh, why = chosen(LARGE, "RTX 4090", 4)
    assert mesh.fsdp > 1 and mesh.data * mesh.fsdp == 4
    assert "data=4 fsdp=1 needs " in why


def test_a_mesh_without_host_memory_for_the_plan_is_left_out():
    """Each host has a copy of its share of the state for a save, which mesh.fsdp divides."""
    card, settings = devices.find_device("H200"), {"memory": MemoryConfig(plan="offload")}
    hosts = [dataclasses.replace(card, host_memory_bytes=gb * 1e9, host_bytes=0.7e9 * gb) for gb in (40, 22, 10)]
    assert "data=2 fsdp=1 " in (why := chosen(LARGE, hosts[0], 2, **settings)[1]) and "lacks" not in why
    mesh, why = chosen(LARGE, hosts[1], 2, **settings)
    assert mesh == MeshConfig(1, 2) and "data=2 fsdp=1 lacks host memory for memory.plan" in why
    with pytest.raises(HostError, match="'offload' pins .*; set plan.host_gb if yours has more"):
        chosen(LARGE, hosts[2], 2, **settings)


def test_devices_that_cannot_share_the_rows_are_left_out():
    mesh, why = chosen(SMALL, "H200", 4, rows_per_step=6)
    assert mesh == MeshConfig(3, 1) and "1 of 4 devices are left out: 6 rows cannot be shared by them all" in why


def test_weights_that_sample_are_divided_where_they_do_not_fit():
    section = ObjectiveConfig("grpo", reward_funcs=["brevity"], max_completion_length=64)
    of_rows, rewarded = (chosen(LARGE, "RTX 4090", 4, **given) for given in ({}, {"objective": objective_of(section)}))
    assert rewarded[0] == of_rows[0] and rewarded[0].fsdp > 1 and "data=4 fsdp=1 needs" in rewarded[1]


@dataclasses.dataclass(frozen=True)
class Sampling(SFT):
    """An objective of a user's own whose rows come from the model."""

    samples = True


def test_an_objective_of_ones_own_that_samples_divides_weights_too(monkeypatch):
    """A source that needs the model asks for the same as an objective that samples."""
    own = Sampling()
    assert chosen(LARGE, "RTX 4090", 2)[0] == chosen(LARGE, "RTX 4090", 2, objective=own)[0] == MeshConfig(1, 2)
    needs = RunNeeds.of(own)
    checks.require_sampling(needs.sampler, BatchSource())
    monkeypatch.setattr(processes, "count", lambda: 2)
    checks.require_sampling(None, BatchSource())
    with pytest.raises(ConfigError, match="objective = Sampling: 2 processes cannot share the sampling of answers"):
        checks.require_sampling(needs.sampler, BatchSource())

    class Asking(BatchSource):
        needs_model = True

    assert RunNeeds.of(SFT(), Asking()).sampler == "train_rows = Asking"
    assert RunNeeds.of(own, Asking()) == needs and not RunNeeds.of(SFT(), BatchSource()).samples


@given(st.integers(1, 64), st.none() | st.integers(1, 8), st.integers(1, 8))
def test_a_source_s_rows_are_shared_as_a_config_s(rows, micro_batches, count):
    """A step on a mesh refuses what a config with these rows does, in the same words; else its rows are shared."""
    mesh = MeshConfig(data=count)

    def of(rows, micro_batches, mesh):
        data = DataConfig(train="x", length=512)
        return TrainConfig(
            ModelConfig(path="x"), data, output="x", rows_per_step=rows, micro_batches=micro_batches, mesh=mesh
        )

    step = dataclasses.replace(StepSpec.of(of(8, None, None)), rows=rows, micro_batches=micro_batches)
    try:
        of(rows, micro_batches, mesh)
    except ConfigError as error:
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            step.on(mesh, count)
    else:
        assert step.on(mesh, count).mesh == mesh and rows % ((micro_batches or 1) * count) == 0


def test_states_on_the_host_are_not_divided():
    offloaded = OptimConfig("adamw_8bit", offload=True)
    assert chosen(SMALL, "H200", 2, optim=offloaded)[0] == MeshConfig(2, 1)


@pytest.mark.full
def test_where_nothing_fits_the_mesh_that_needs_least_is_planned():
    mesh, why = chosen(LARGE, "RTX 3060", 2)
    assert mesh == MeshConfig(1, 2) and "; data=2 fsdp=1 needs " in why and "; data=1 fsdp=2 needs " in why


def on_h200(**settings):
    """A function of mesh and budget in GB (None: the device's) to the forecast of a step of 8B on H200s; `plan`: of
    memory.plan; `resident`: the least of it."""
    config = TrainConfig(
        model=ModelConfig(path="x"),
        data=DataConfig(train="x", length=2048),
        steps=1,
        output="x",
        micro_batches=1,
        **settings,
    )
    model = abstract_model(config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"]), StepSpec.of(config).model)
    device = devices.find_device("NVIDIA H200")

    def forecast(mesh, budget_gb=None, plan=None, resident=0):
        memory = MemoryConfig(budget_gb=budget_gb and budget_gb * 1e9 / 2**30, plan=plan)
        changed = dataclasses.replace(config, mesh=mesh, memory=memory)
        budget_bytes = devices.budget(changed.memory, device)
        costs = step_cost(model, StepSpec.of(changed)).limited({"resident": (resident, 32)})
        return meshes.choose(costs, StepSpec.of(changed), device, budget_bytes)

    forecast.device = device
    return forecast


@pytest.fixture(scope="module")
def lora():
    return on_h200(rows_per_step=16, adapter=AdapterConfig())


def test_gathers_cost_time(lora):
    """A step over two divided H200s is slower than each alone by what was measured."""
    alone, divided = lora(MeshConfig(2, 1)), lora(MeshConfig(1, 2), plan="keep")
    assert 0.94 < alone.step_seconds / divided.step_seconds < 0.97
    # Half of each layer's 436 MB, there and (but the last one's) back, and of embedding and head.
    received = 31.5 * 436e6 + 1.05e9
    assert divided.collective_seconds == pytest.approx(received / lora.device.peer, rel=0.05)
    assert alone.exposed_seconds < 0.01 * alone.step_seconds


@pytest.mark.full
def test_room_is_used_to_gather_trained_weights_once():
    """Those of full fine-tuning, which each step changes."""
    full = on_h200(rows_per_step=4, optim=OptimConfig("adamw_8bit", weights="bf16"))
    mesh = MeshConfig(1, 2)
    again, once, some = full(mesh, plan="keep"), full(mesh), full(mesh, budget_gb=50)
    assert [f.plan.level("whole") for f in (again, once)] == [0, 32]
    assert once.peak_bytes == pytest.approx(again.peak_bytes + 31 * 436e6, rel=0.1)
    assert 1 < some.plan.level("whole") < 32 and some.peak_bytes < 50e9
    assert again.step_seconds > some.step_seconds > once.step_seconds
    assert not any(f.plan.level("resident") for f in (again, once, some))
    assert full(MeshConfig(2, 1)).plan.level("whole") == 0


@pytest.mark.full
def test_room_is_used_to_hold_frozen_weights_whole(lora):
    """For less memory than to gather them once a step, and none of the time."""
    mesh = MeshConfig(1, 2)
    divided, once, held = lora(mesh, plan="keep"), lora(mesh, plan="keep; whole=32"), lora(mesh)
    some, tight = lora(mesh, plan="keep; resident=16"), lora(mesh, budget_gb=63)
    assert held.plan.level("resident") == 32 and not held.plan.level("whole")
    assert once.peak_bytes - held.peak_bytes == pytest.approx(16 * 436e6, rel=0.1)  # the parts beside the whole
    alike = lora(MeshConfig(2, 1))  # adapters are whole on either mesh, and summed once a step
    assert (held.peak_bytes, held.step_seconds) == pytest.approx((alike.peak_bytes, alike.step_seconds))
    assert divided.step_seconds > some.step_seconds > held.step_seconds
    assert divided.peak_bytes < some.peak_bytes < held.peak_bytes
    assert some.exposed_seconds < divided.exposed_seconds and held.exposed_seconds == alike.exposed_seconds
    assert not alike.plan.level("resident")
    # To offload residuals under layers costs less than to gather weights.
    assert tight.plan.level("resident") == 32 and tight.host_bytes > 0
    assert tight.peak_bytes < 63e9 and tight.step_seconds < divided.step_seconds


@pytest.mark.full
def test_weights_that_lie_whole_already_stay_so(lora):
    """A smaller plan of a step that ran out of memory has no fewer of them."""
    free, found = (lora(MeshConfig(1, 2), budget_gb=30, resident=least) for least in (0, 20))
    assert free.plan.level("resident") < 20 <= found.plan.level("resident")
    assert found.peak_bytes < 30e9 and found.plan.residuals.layers != free.plan.residuals.layers


@pytest.mark.parametrize("named", [MeshConfig(1, 2), None])
def test_a_named_mesh_and_cpus_leave_nothing_to_choose(named):
    config = TrainConfig(
        model=ModelConfig(path="x"),
        data=DataConfig(train="x"),
        rows_per_step=8,
        output="x",
        adapter=AdapterConfig(),
        mesh=named,
    )
    assert len(jax.devices()) > 1
    spec = StepSpec.of(config)
    assert meshes.mesh_of(spec, lambda: pytest.fail("asked for a model")) == (named or MeshConfig(), None)


def test_several_gpus_are_used_unasked(monkeypatch):
    gpu = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", process_index=0, memory_stats=lambda: {"bytes_limit": 1.4e11}
    )
    monkeypatch.setattr(meshes.jax, "devices", lambda: [gpu, gpu])
    monkeypatch.setattr(meshes.jax, "local_devices", lambda: [gpu, gpu])
    config = TrainConfig(
        model=ModelConfig(path="x"),
        data=DataConfig(train="x"),
        rows_per_step=8,
        output="x",
        steps=1,
        adapter=AdapterConfig(),
    )
    spec = StepSpec.of(config)
    mesh, why = meshes.mesh_of(spec, lambda: abstract_model(config_from_hf(SMALL), spec.model))
    assert mesh == MeshConfig(2, 1) and "tokens/s at" in why
