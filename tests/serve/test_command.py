"""`jaxtune serve`: what it loads, and what it refuses."""

from __future__ import annotations

import argparse
import re
import threading

import jax
import pytest
from flax import nnx
from tiny_models import adapted_model

import jaxtune
from jaxtune import cli
from jaxtune.commands.serve import _models
from jaxtune.models.generation import slots
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.hf import Pretrained
from jaxtune.models.lora import has_adapter
from jaxtune.serve.server import Server
from tests import patience
from tests.serve.running import BASE


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    model, tokenizer = jaxtune.from_pretrained(BASE, dtype="float32")
    folder = tmp_path_factory.mktemp("run") / "mine"
    jaxtune.save_adapter(adapted_model(model, r=4), folder, tokenizer)
    return folder


def leaves(model) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(model))


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_is_served_beside_its_base(adapter, alone):
    """By its own folder, or over a base that is named."""
    given = (adapter, []) if alone else (BASE, [f"mine={adapter}"])
    settings = dict(dtype="float32", load_in=None, no_pictures=False, max_pixels=None, remote_images=False)
    options = argparse.Namespace(model=str(given[0]), adapter=given[1], **settings)
    base, mine = _models(options, lambda *_: None)
    assert (base.name, base.base, mine.name, mine.base) == ("base", None, "mine", "base")
    assert has_adapter(mine.model) and not has_adapter(base.model)
    own = {id(array) for array in leaves(mine.model)}
    assert leaves(base.model) and all(id(array) in own for array in leaves(base.model))


def test_programs_are_prepared_while_weights_load(capsys, monkeypatch):
    prepares_while_weights_load(BASE, capsys, monkeypatch)


def test_programs_are_prepared_while_an_adapters_base_loads(adapter, capsys, monkeypatch):
    prepares_while_weights_load(adapter, capsys, monkeypatch)


def prepares_while_weights_load(model, capsys, monkeypatch):
    """The load waits for them, and after it nothing is compiled."""
    load, prepare, prepared, lengths = Pretrained.load, Sampler.prepare, threading.Event(), []

    def loading(pretrained, *given, **how):
        assert prepared.wait(patience.SECONDS)
        return load(pretrained, *given, **how)

    def preparing(sampler):
        programs = prepare(sampler)
        lengths.append(programs.loaded + programs.compiled)
        prepared.set()
        return programs

    monkeypatch.setattr(Pretrained, "load", loading)
    monkeypatch.setattr(Sampler, "prepare", preparing)
    monkeypatch.setattr(Server, "run_until_signal", lambda server: server._engine.close(60))
    slots.programs.cache_clear()
    flags = ["--port", "0", "--slots", "2", "--length", "128", "--dtype", "float32"]
    assert cli.main(["serve", str(model), *flags]) == 0
    before, after = lengths
    assert before > 10 and after == 0
    assert re.search(r"0 loaded, 0 compiled in .* while the weights loaded, \d+ and \d+", capsys.readouterr().out)


def test_two_models_of_one_name_are_refused(adapter, capsys):
    flags = ["--port", "0", "--adapter", f"base={adapter}"]
    assert cli.main(["serve", str(BASE), *flags]) == 2
    assert "two models have the name 'base'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines: give --api-key-file FILE"),
        (["--api-key", ""], "is empty"),
        (["--api-key", " \n"], "is empty"),
        (["--api-key", "a", "--api-key-file", "b"], "give one of them"),
        (["--timeout", "0"], "--timeout 0: must be positive"),
        (["--grace", "-1"], "--grace -1: must be 0 or more"),
    ],
)
def test_a_flag_that_is_wrong(flags, message, capsys, monkeypatch):
    monkeypatch.delenv("JAXTUNE_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", str(BASE), *flags])
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapter", "x"], "--adapter x: must be NAME=FOLDER"),
        (["--adapter", "a=nowhere"], "nowhere is not a folder"),
        (["--host", "no.such.host.example.invalid", "--api-key", "k"], "is not available"),
    ],
)
def test_what_cannot_be_served(flags, message, capsys):
    assert cli.main(["serve", str(BASE), "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err
