"""Ceilings: measured once, cached, and data sheets by the device's name."""

from __future__ import annotations

import json
import re

import jax
import pytest

from jaxtune.profile import ceilings, device
from jaxtune.profile.data_sheets import known_devices, refusal
from jaxtune.profile.device import Ceilings, cache_file, known_ceilings
from jaxtune.profile.report import _kernels
from jaxtune.profile.roofline import floor_ns, losses
from jaxtune.profile.trace import KERNEL, TO_DEVICE, Event


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path))


def test_measured_once_then_cached():
    first = ceilings()
    assert first.source == "measured"
    assert first.device == "cpu"
    assert first.gemm_bf16_tflops > 0
    assert first.gemm_fp8_tflops > 0
    assert first.copy_tbps > 0
    assert first.launch_us > 0
    assert json.loads(cache_file("cpu").read_text())["measured_at"] == first.measured_at
    assert ceilings() == first
    assert known_ceilings("cpu") == first


def test_the_host_link_is_measured_with_all_devices_copying(monkeypatch):
    """Cards share what leads to the host; the rate is each one's."""
    seen = []

    def seconds(run):
        seen.append({(array.device, array.sharding.memory_kind) for array in run()})
        return 0.5

    monkeypatch.setattr(device, "_seconds", seconds)
    devices = jax.local_devices()
    assert len(devices) > 1
    assert device._host_link_gbps(devices, 1 << 20) == ((1 << 20) / 0.5e9,) * 2
    assert seen == [{(one, kind) for one in devices} for kind in ("device", "pinned_host")]


def test_a_damaged_cache_says_what_to_do():
    file = cache_file("NVIDIA H200")
    file.parent.mkdir(parents=True)
    file.write_text('{"device": 3}')
    with pytest.raises(ValueError, match="delete it, then run `.*jaxtune profile ceilings`"):
        known_ceilings("NVIDIA H200")


def test_measuring_again_replaces_a_damaged_cache(monkeypatch):
    monkeypatch.setattr(device, "_measure", lambda _: DEVICE)
    file = cache_file("cpu")
    file.parent.mkdir(parents=True)
    file.write_text('{"device": 3}')
    with pytest.raises(ValueError, match="delete it"):
        ceilings()
    assert ceilings(remeasure=True) == DEVICE
    assert json.loads(file.read_text())["device"] == DEVICE.device


@pytest.mark.parametrize(
    ("device", "bf16", "copy"),
    [
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA GH200 480GB", 989, 4.9),
        ("NVIDIA H100 80GB HBM3", 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA A100-SXM4-80GB", 312, 2.0),
        ("NVIDIA L40S", 362, 0.864),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA GeForce RTX 4090", 165.2, 1.01),
        ("NVIDIA GeForce RTX 4090 D", 147.1, 1.01),
        ("NVIDIA B200", 2250, 8.0),
    ],
)
def test_data_sheets(device, bf16, copy):
    found = known_ceilings(device)
    assert (found.gemm_bf16_tflops, found.copy_tbps, found.source) == (bf16, copy, "data sheet")


@pytest.mark.parametrize("device", ["NVIDIA L400", "RTX 4090DX", "cpu", "", "TPU v5e"])
def test_unknown_devices_have_no_ceilings(device):
    assert known_ceilings(device) is None


# Names that nvidia-smi or a user has for cards of compute capability 5.2 to 7.5.
OLD = """Tesla M60, Tesla P4, Tesla P6, Tesla P40, Tesla P100-PCIE-16GB, Tesla V100-SXM2-32GB, Tesla V100S-PCIE-32GB,
Tesla T4, NVIDIA T4G, NVIDIA T1000 8GB, NVIDIA GeForce GTX 980 Ti, NVIDIA GeForce GTX 1050, GTX 1070 Ti,
NVIDIA GeForce GTX 1080, gtx 1080ti, NVIDIA GeForce GTX 1650 SUPER, NVIDIA GeForce GTX 1660 Ti with Max-Q Design,
NVIDIA GeForce GTX TITAN X, NVIDIA TITAN X (Pascal), NVIDIA TITAN Xp, NVIDIA TITAN V, NVIDIA TITAN RTX,
NVIDIA GeForce RTX 2060, NVIDIA GeForce RTX 2070 SUPER, NVIDIA GeForce RTX 2080 Ti, Quadro P6000, Quadro GP100,
Quadro GV100, Quadro T2000, Quadro RTX 3000, Quadro RTX 4000, Quadro RTX 8000, V100, T4, P4"""


@pytest.mark.parametrize("device", re.split(r",\s+", OLD))
def test_cards_before_ampere_are_refused(device):
    assert "is older than compute capability 8.0" in (refusal(device) or "")


def test_the_card_is_named_as_far_as_it_matters():
    assert refusal("NVIDIA GeForce RTX 2080 Ti").startswith("RTX 2080 Ti is older")
    assert refusal("Tesla P100-PCIE-16GB").startswith("P100 is older")


def test_cards_since_ampere_are_not_refused():
    others = ("NVIDIA GeForce RTX 2050", "NVIDIA RTX 4000 SFF Ada Generation", "NVIDIA A2", "NVIDIA RTX A400", "cpu")
    assert [name for name in (*known_devices(), *others, "NVIDIA Quadro RTX A6000") if refusal(name)] == []


DEVICE = Ceilings("made up", gemm_bf16_tflops=500, gemm_fp8_tflops=1000, copy_tbps=4.0)
NO_FP8 = Ceilings("made up", gemm_bf16_tflops=500, gemm_fp8_tflops=0, copy_tbps=4.0)  # as the sheet of an A100


def test_least_time_of_a_product():
    assert floor_ns(5e9, 4e6, "bf16", DEVICE) == (pytest.approx(10_000), "compute")
    assert floor_ns(5e9, 4e6, "f8e4m3fn", DEVICE) == (pytest.approx(5_000), "compute")
    for dtype in ("f32", "float", "float32"):  # by XLA and by torch
        assert floor_ns(5e9, 4e6, dtype, DEVICE) == (pytest.approx(20_000), "compute")
    assert floor_ns(5e9, 4e8, "bf16", DEVICE) == (pytest.approx(100_000), "memory")
    assert floor_ns(5e9, 4e6, "s8", NO_FP8) == (pytest.approx(1_000), "")


def event(
    ms, category, *, flops=0.0, moved=0.0, phase="forward", scope="layer/mlp", kind=KERNEL, dtype="bf16"
) -> Event:
    return Event(
        0.0,
        ms * 1e6,
        "k",
        "s",
        kind,
        category,
        scope,
        phase,
        dtype=dtype,
        flops=flops,
        moved_bytes=moved,
        self_ns=ms * 1e6,
    )


@pytest.mark.parametrize("dtype", ["f8e4m3fn", "s8", "c10::Float8_e4m3fn"])
@pytest.mark.parametrize("category", ["GEMM", "attention", "MoE"])
def test_a_kernel_whose_ceiling_is_unknown_loses_nothing(category, dtype):
    unknown = event(1, category, flops=1e11, moved=1e3, dtype=dtype)
    assert losses([unknown], 1, 0.0, NO_FP8) == []
    assert losses([unknown, event(1, category)], 1, 0.0, NO_FP8) == []  # with a helper, which has no FLOPs
    (found,) = losses([unknown, event(2, category, flops=5e11)], 1, 0.0, NO_FP8)
    assert (found.what, found.saved_ms) == (category, pytest.approx(1))  # that of bf16
    assert "ceiling is 500 in bf16, unknown in FP8 (" in found.text
    (row,) = _kernels([unknown], 1, NO_FP8)
    assert (row.bound, row.of_ceiling) == ("", 0.0)


def test_losses_are_ranked_and_count_each_moment_once():
    events = [
        event(10, "GEMM", flops=4e12, moved=1e6),  # 8 ms at the ceiling
        event(3, "GEMM", flops=1e9, moved=8e9),  # bound by memory
        event(5, "elementwise and norms", moved=16e9),  # 4 ms at the ceiling
        event(6, "GEMM", flops=1e12, phase="recompute"),
        event(1.5, "copies to device", moved=1e8, kind=TO_DEVICE),
    ]
    unknown = losses(events, 1, 0.5, Ceilings("unknown", 0, 0, 0))
    assert [loss.what for loss in unknown] == ["recompute", "passes over memory: layer/mlp", "copies to device", "idle"]
    found = losses(events, 1, 0.5, DEVICE)
    won = {loss.what: pytest.approx(loss.saved_ms) for loss in found}
    assert won == {
        "recompute": 6,
        "passes over memory: layer/mlp": 5,
        "thin products": 3,
        "GEMM": 2,
        "copies to device": 1.5,
        "idle": 0.5,
    }
    assert [loss.saved_ms for loss in found] == sorted((loss.saved_ms for loss in found), reverse=True)
    assert "at 400 TFLOP/s" in next(loss.text for loss in found if loss.what == "GEMM")
    assert "1.0 ms by reaching 4.0 TB/s" in next(loss.text for loss in found if loss.what.startswith("passes"))
