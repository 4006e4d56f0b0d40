"""jaxtune doctor: what it finds, and what it says to do."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from jaxtune import cli
from jaxtune.commands import exact_check
from jaxtune.commands import machine_checks as doctor
from jaxtune.models.files.quant import quantize
from jaxtune.pallas.formats import Stored
from jaxtune.profile.device import nvidia_smi
from tests.models.tiny_models import tiny_model
from tests.serve.running import BASE


def tell_of(monkeypatch, tmp_path, text: str, code: int = 0):
    """An nvidia-smi that says `text`."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_machine_without_a_gpu_is_told_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("ok    packages: jax ")]
    assert "note  driver: there is no nvidia-smi, so no NVIDIA driver" in lines
    assert "note  GPU: none; JAX runs on cpu" in lines
    assert [line for line in lines if line.startswith("ok    attention: forward and backward within ")]
    assert not [line for line in lines if "TFLOP/s" in line]  # a CPU's speed says nothing


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [
        ("580.65.06", "ok", "pip install '.[cuda13]'"),
        ("550.54.15", "ok", "pip install '.[cuda12]'"),
        ("470.10", "wrong", "install NVIDIA's driver 525 or newer"),
    ],
)
def test_the_driver_says_which_extra_it_runs(monkeypatch, tmp_path, version, state, words):
    tell_of(monkeypatch, tmp_path, f"NVIDIA H200, {version}, 143771, 500")
    finding = doctor._driver(doctor._nvidia_smi())
    assert finding.state == state and words in finding.to_text()


@pytest.mark.parametrize(
    ("visible", "asked"),
    [(None, "0"), ("", "0"), ("-1", "0"), ("2,3", "2"), ("GPU-8d3f, GPU-1", "GPU-8d3f"), ("MIG-1", "0")],
)
def test_the_gpu_that_is_asked_about_is_the_first_that_jax_sees(monkeypatch, tmp_path, visible, asked):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nfor last; do :; done; echo $last\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert nvidia_smi("name") == {"name": f"--id={asked}"}


def test_a_driver_that_fails_is_wrong(monkeypatch, tmp_path):
    tell_of(monkeypatch, tmp_path, "Driver/library version mismatch", 18)
    finding = doctor._driver(doctor._nvidia_smi())
    assert finding.state == "wrong" and "Driver/library version mismatch" in finding.summary


@pytest.mark.parametrize("text", ["", " ", "\\n \\n"])
@pytest.mark.parametrize("code", [0, 9])
def test_an_nvidia_smi_that_says_nothing_is_wrong(monkeypatch, tmp_path, text, code):
    tell_of(monkeypatch, tmp_path, text, code)
    finding = doctor._driver(doctor._nvidia_smi())
    assert finding.state == "wrong" and f"it says nothing and exits with {code}" in finding.summary


def test_a_gpu_that_jax_does_not_use_is_wrong(monkeypatch, tmp_path, capsys):
    tell_of(monkeypatch, tmp_path, "NVIDIA H200, 580.65.06, 143771, 500")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert cli.main(["doctor", "--quick"]) == 1
    text = capsys.readouterr().out
    assert "wrong GPU: NVIDIA H200 is there, and JAX does not use it\n      JAX_PLATFORMS keeps JAX from it" in text
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    [finding] = doctor._devices({"name": "NVIDIA H200", "memory.used": "500"})
    assert "pip install '.[cuda13]'" in finding.fix


def test_slow_cards_and_old_ones_are_named(monkeypatch):
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 100e9}, compute_capability="9.0"
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    rates = SimpleNamespace(gemm_bf16_tflops=680.0, copy_tbps=4.2, to_device_gbps=12.0, to_host_gbps=55.0)
    monkeypatch.setattr("jaxtune.profile.ceilings", lambda: rates)
    states = {finding.summary.split(":")[0]: finding for finding in doctor._rates()}
    assert [name for name, finding in states.items() if finding.state != "ok"] == ["link to the device"]
    assert "fewer lanes" in states["link to the device"].fix
    [ok, busy] = doctor._devices({"name": "H200", "memory.used": "20480"})
    assert (ok.state, busy.summary) == ("ok", "GPU memory in use by all programs: 20.0 GiB")
    device.device_kind = "Tesla V100-SXM2-16GB"
    wrong = next(doctor._devices(None))
    assert wrong.state == "wrong" and "use a newer card" in wrong.fix


@pytest.mark.parametrize(("capability", "noted"), [("8.9", True), ("9.0", False), ("12.0", True)])
def test_the_kernels_of_cards_other_than_hopper_need_jax_triton(monkeypatch, capability, noted):
    device = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", memory_stats=dict, compute_capability=capability
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    named = [finding.summary for finding in doctor._devices(None) if finding.state == "note"]
    assert named == (["jax-triton is not installed"] if noted else [])


def test_a_wrong_kernel_is_found(monkeypatch):
    from jaxtune.pallas import attention as package

    whole = package.attention
    monkeypatch.setattr(
        package,
        "attention",
        lambda q, k, v, layout, *, scale, implementation=None: whole(
            q, k, v, layout, scale=scale * (1.5 if implementation is None else 1.0), implementation=implementation
        ),
    )
    finding = doctor._attention()
    assert finding.state == "wrong" and "jaxtune info --kernels" in finding.fix


@pytest.mark.parametrize("of", [0, 1, 2], ids=["query", "key", "value"])
def test_a_kernel_with_a_gradient_that_is_no_number_is_found(monkeypatch, of):
    from jaxtune.pallas import attention as package

    @jax.custom_vjp
    def broken(array):
        return array

    broken.defvjp(lambda array: (array, None), lambda _, gradient: (gradient * float("nan"),))
    whole = package.attention

    def attention(*arrays, scale, implementation=None):
        given = list(arrays)
        if implementation is None:
            given[of] = broken(given[of])
        return whole(*given, scale=scale, implementation=implementation)

    monkeypatch.setattr(package, "attention", attention)
    finding = doctor._attention()
    assert finding.state == "wrong" and "within nan of float32's" in finding.summary


@pytest.mark.full
@pytest.mark.usefixtures("compiled_in_full")
def test_exact_compares_sampler_and_training(capsys):
    """Of the packaged model: every operation, and what the sampler said of its tokens."""
    assert cli.main(["doctor", "--exact", str(BASE)]) == 0
    shown = capsys.readouterr().out
    assert "decoding: attention: 0 of" in shown and "sampled: log-probabilities: 0 of 384 differ" in shown
    assert shown.strip().endswith("all bits are equal")


def test_exact_compares_what_the_sampler_multiplies(monkeypatch):
    """Over weights that it has decoded once."""
    monkeypatch.setattr("jaxtune.models.generation.sampler.room_bytes", lambda share: 1e12)
    kinds = []

    def differences(model, *values, sampled):
        for compared in (model, sampled):
            matrices = [matrix for layer in compared.layers for *_, matrix in layer.matrices()]
            kinds.append({isinstance(matrix.stored_weight, Stored) for matrix in matrices})
        return ()

    monkeypatch.setattr("jaxtune.models.generation.differences.differences", differences)
    list(exact_check._lines(quantize(tiny_model(max_position_embeddings=512), "nf4"), True))
    assert kinds == [{True}, {False}]


def test_exact_says_when_an_operation_differs(capsys, monkeypatch):
    found = [exact_check._Line("decoding", "down", 3, 10, 2, 0.5), exact_check._Line("sampled", "log-probabilities")]
    monkeypatch.setattr(exact_check, "_lines", lambda model, exact: iter(found))
    assert cli.main(["doctor", "--exact", str(BASE)]) == 1
    assert "decoding: down: 2 of 10 differ, by up to 0.5, from layer 3 on" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--load-in", "nf4"])
