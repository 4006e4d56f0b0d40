"""What a model takes on a device is known before it is loaded, and what has no room is refused at once."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import jax
import pytest
from checks import shapes_of
from random_weights import write_checkpoint
from tiny import CONFIGS

from jaxtune.models.files import load_memory
from jaxtune.models.hf import Pretrained, from_pretrained, save_pretrained


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that has all kinds of tensors: linears, experts, a router, norms, an embedding and a head."""
    write_checkpoint(tmp_path / "model", CONFIGS["qwen3_moe"], shapes_of(CONFIGS["qwen3_moe"]))
    return tmp_path / "model"


def held(model) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(jax.tree.leaves(model)))


@pytest.mark.parametrize("load_in", [None, "nf4", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bytes_are_those_of_the_loaded_model(folder, tmp_path, dtype, load_in):
    pretrained = Pretrained(folder, dtype, load_in)
    model = pretrained.load()
    assert pretrained.device_bytes() == held(model)
    if load_in is not None:
        assert Pretrained(folder, dtype).device_bytes(load_in) == held(model)
        with pytest.warns(UserWarning) if load_in == "nf4" else contextlib.nullcontext():
            save_pretrained(model, tmp_path / "packed")
        again = Pretrained(tmp_path / "packed", dtype)
        # Tables and padding of what a file holds are not all kept.
        assert again.device_bytes() == pytest.approx(held(again.load()), rel=0.25)


class Device:
    device_kind = "RTX 3060"

    def __init__(self, limit: int, used: int = 0):
        self.stats = {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self):
        return self.stats


def refused(monkeypatch, folder, device, **settings) -> str:
    monkeypatch.setattr(load_memory.jax, "local_devices", lambda: [device])
    with pytest.raises(ValueError) as error:
        from_pretrained(folder, **settings)
    return str(error.value)


@pytest.mark.full
def test_what_has_no_room_is_refused_with_what_has(folder, monkeypatch):
    whole, nf4 = Pretrained(folder, "bfloat16").device_bytes(), Pretrained(folder, "bfloat16", "nf4").device_bytes()
    assert nf4 < whole
    monkeypatch.setattr(load_memory, "_GB", 1e3)  # tiny models have kilobytes
    text = refused(monkeypatch, folder, Device(whole - 1))
    assert f"{folder}: its weights take {whole / 1e3:.1f} GB in bfloat16, and the device (RTX 3060) has" in text
    assert f"in four bits they take {nf4 / 1e3:.1f} GB: --load-in nf4 (in Python load_in='nf4'" in text
    text = refused(monkeypatch, folder, Device(2 * whole, 2 * whole - nf4))
    assert f"has {2 * whole / 1e3:.1f} GB, of which {nf4 / 1e3:.1f} are free; in four bits they take" in text
    text = refused(monkeypatch, folder, Device(nf4 - 1))
    assert f"in four bits, too, they take {nf4 / 1e3:.1f} GB; a smaller model or a larger card is needed" in text
    text = refused(monkeypatch, folder, Device(nf4 - 1), load_in="nf4")
    assert "in four bits (NF4), and the device" in text and text.endswith("a smaller model or a larger card is needed")
    for device, settings in ((Device(whole), {}), (Device(nf4), {"load_in": "nf4"}), (SimpleNamespace(), {})):
        device.memory_stats = getattr(device, "memory_stats", lambda: None)
        monkeypatch.setattr(load_memory.jax, "local_devices", lambda device=device: [device])
        Pretrained(folder, "bfloat16", **settings).load()
