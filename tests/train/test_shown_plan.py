"""--plan without weights and rows: it is the plan of the run; what the config shows is refused before reading files."""

from types import SimpleNamespace

import pytest

from jaxtune import cli
from jaxtune.models.placement import partition
from jaxtune.pallas import targets
from jaxtune.pallas.formats import fp8
from jaxtune.system import host_memory
from jaxtune.train import shown_plan


@pytest.mark.full
def test_a_plan_without_rows_is_that_of_the_run(monkeypatch, capsys, tmp_path):
    """On GPUs that share the host's memory, of which there are fewer here than a mesh may ask for."""
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(host_memory, "size_bytes", lambda: 400e9)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "500")
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 140e9})

    def make_mesh(*sizes):
        size = partition.mesh_shape(*sizes).size
        if size > 4:
            raise ValueError("mesh.data = 8: there are 4 gpu devices")
        return SimpleNamespace(size=size, local_devices=[gpu])

    monkeypatch.setattr(partition.jax, "device_count", lambda: 4)
    monkeypatch.setattr(shown_plan.jax, "local_devices", lambda: [gpu])
    monkeypatch.setattr(shown_plan.partition, "make_mesh", make_mesh)
    planned = []
    monkeypatch.setattr(shown_plan.plan_text, "plan_elsewhere", lambda *given: planned.append(given))
    recipe = ["train", "qlora-8b", "--plan", "rows_per_step=8"]
    assert cli.main([*recipe, "mesh.data=4"]) == 0
    (_, parts, device, *_), *_ = planned
    assert (parts.shape.devices, device.host_bytes, device.host_memory_bytes) == (4, 0.7 * 400e9 / 4, 100e9)
    with pytest.raises(ValueError, match="mesh.data = 8: there are 4 gpu devices"):
        cli.main([*recipe, "mesh.data=8"])
    capsys.readouterr()
    assert cli.main([*recipe, "mesh.data=-1", "rows_per_step=6"]) == cli.USER_ERROR
    assert "mesh.data = 4: must divide the 6 rows of a micro-batch" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("here", [None, "NVIDIA H200", "NVIDIA GeForce RTX 4090"])
def test_quantised_products_take_what_was_fitted_for_the_planned_device(monkeypatch, here):
    """Whichever GPU this machine has; today the tables have rows of an H200 only, so this one is made up."""
    monkeypatch.setattr(targets, "device_kind", lambda: here)
    monkeypatch.setitem(fp8._PRODUCT_TIME.rows, ("RTX 4090", "mosaic"), ((1.12, 1.44), "made up"))
    planned = []
    monkeypatch.setattr(shown_plan.plan_text, "plan_elsewhere", lambda *given: planned.append(given[1]))
    for device in ("H200", "RTX 4090"):
        assert cli.main(["train", "fp8-8b", "--plan", f"plan.device={device}"]) == 0
    flops = [sum(segment.work.flops for segment in parts.layers.segments) for parts in planned]
    assert flops[1] == pytest.approx(2 * flops[0])


def test_what_a_config_alone_shows_is_refused_before_a_file_is_read(monkeypatch, capsys):
    def read(*given):
        raise AssertionError

    monkeypatch.setattr(shown_plan, "find_config", read)
    plan = ["train", "qlora-8b", "--plan"]
    for changes, words in (
        (["plan.device=RTX 4090", "mesh.data=-1"], "mesh.data = -1: how many devices plan.device has beside it"),
        (["plan.device=RTX 1"], "plan.device = 'RTX 1': not a device that is known"),
        (["plan.device=RTX 4090", "adapter={path: x}"], "adapter.path = 'x': a plan without weights needs"),
        ([], "plan.device is not set, and this machine has no GPU"),
    ):
        assert cli.main([*plan, *changes]) == cli.USER_ERROR
        assert words in capsys.readouterr().err


def test_a_plan_from_shapes_refuses_what_the_run_does(capsys):
    whole = ["adapter=null", "optim.learning_rate=1e-5"]
    for changes, words in (
        (["optim.embedding_learning_rate=1e-4"], "neither embed_tokens nor lm_head trains; name them in"),
        (["steps=10", "profile.steps=3", "profile.start=10"], "profile.start = 10: the run has only 10 steps"),
        ([*whole, "objective={name: distill, teacher: base}"], "this one has no adapter: set adapter: {}"),
        (
            ["qat=nvfp4-nvfp4", "objective={name: grpo, reward_funcs: [brevity]}"],
            "observes activations on the rows of the first step, and objective = grpo samples them during it",
        ),
    ):
        assert cli.main(["train", "lora-0.5b", "--plan", "plan.device=RTX 4090", *changes]) == cli.USER_ERROR
        assert words in capsys.readouterr().err


def test_slots_of_a_run_that_divides_weights_are_planned_from_a_device_s_share(capsys):
    """Those of two small devices, of which one alone holds no model; and a plan without room for one is refused."""
    grpo = "objective={name: grpo, reward_funcs: [brevity], num_generations: 8, max_completion_length: 256}"
    plan = ["train", "lora-8b", "--plan", "plan.device=H200", grpo, "rows_per_step=16", "data.length=512"]
    small = [*plan, "memory.budget_gb=13"]
    assert cli.main(small) == cli.USER_ERROR
    assert "GB" in capsys.readouterr().err
    assert cli.main([*small, "mesh.fsdp=2"]) == 0
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "gathered weights" in text and "sampling between two steps: 8 slots of 512 tokens" in text
    # All layers stay whole where there is memory, which leaves as much for slots as one device has.
    assert cli.main([*plan, "memory.budget_gb=22", "mesh.fsdp=2", "memory.plan=keep; resident=32"]) == 0
    shown = capsys.readouterr()
    whole = shown.out + shown.err
    assert "gathered weights" not in whole and "sampling between two steps: 8 slots" in whole
    assert cli.main([*plan, "memory.budget_gb=17.5", "mesh.fsdp=2", "memory.plan=recompute; resident=32"]) == 0
    assert "sampling between two steps: 6 slots" in "".join(capsys.readouterr())
    in_fp8 = grpo.replace("}", ", cache: fp8}")
    same = [in_fp8 if word == grpo else word for word in plan]
    assert cli.main([*same, "memory.budget_gb=17.5", "mesh.fsdp=2", "memory.plan=recompute; resident=32"]) == 0
    shown = "".join(capsys.readouterr())
    assert "sampling between two steps: 8 slots" in shown and "keys and values in fp8" in shown


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_plan_of_own_samples_says_how_many_are_sampled_at_a_time(share, capsys):
    options = f"name: distill, teacher: base, on_policy: {share}" + ", max_completion_length: 256, cache: fp8" * (
        share > 0
    )
    plan = ["train", "lora-0.5b", "--plan", "plan.device=H200", f"objective={{{options}}}", "rows_per_step=16"]
    assert cli.main(plan) == 0
    shown = "".join(capsys.readouterr())
    assert ("sampling between two steps: 16 slots of 768 tokens" in shown) == (share > 0)
    assert ("keys and values in fp8" in shown) == (share > 0)
