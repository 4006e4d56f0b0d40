"""An MLP in FP8 with scales of 128 x 128, whose two segments the backward differentiates at once: the gradients are
those of one segment after the next."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest
from checks import assert_gradients_are, stack_gradients
from tiny_models import adapted_model, golden_model

from benchmarks.random_model import in_blocks
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan
from jaxtune.models.stack.stack import _differentiable
from jaxtune.models.stack.stack_layers import low_rank_inputs
from jaxtune.models.stack.stack_segments import differentiated, low_rank_of, without_gradient
from jaxtune.pallas.quant_matmul import in_e4m3, reference

SHAPE = (2, 12)
# not the function that the package has under this name
gated_module = importlib.import_module("jaxtune.pallas.quant_matmul.gated_matmul")
NAMES = ["gate_proj", "up_proj", "down_proj"]


def in_fp8(name: str = "qwen3", targets=NAMES, **settings):
    """A tiny model in FP8 with adapters on these linears, which multiply as they are stored."""
    model = adapted_model(in_blocks(golden_model(name)), r=3, target_modules=targets, **settings)
    for layer in model.layers:
        for matrix in layer.matrices():
            matrix.matrix.fp8 = True
    return model


KEPT = dict(gate=jnp.zeros(1), up=jnp.zeros(1))


def segments_of(model, saved=KEPT):
    return differentiated(model.layers[0].segments(), saved)


@pytest.fixture
def one_by_one(monkeypatch):
    """Calling it leaves each segment to be differentiated alone."""

    def leave():
        monkeypatch.setattr(MLP, "_joins", lambda mlp: False)
        jax.clear_caches()

    yield leave
    jax.clear_caches()


PLANS = {
    "keep": KEEP,
    "recompute": RECOMPUTE,
    "some": LayerPlan("recompute", mid="offload", gate="keep", up="offload"),
    "fp8": LayerPlan("keep", gate="fp8", up="fp8"),
}


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_of_one_segment_after_the_next(plan, one_by_one, monkeypatch, compiled_in_full):
    """Compiled in full, because a number between two codes would be rounded to another one."""
    model = in_fp8()
    calls = []
    rule = gated_module._second_half_backward
    monkeypatch.setattr(
        gated_module, "_second_half_backward", lambda *given: calls.append(given[4] is not None) or rule(*given)
    )
    found = stack_gradients(model, PLANS[plan], SHAPE)
    assert set(calls) == {plan in ("keep", "some")}
    calls.clear()
    one_by_one()
    assert_gradients_are(found, stack_gradients(model, PLANS[plan], SHAPE))
    assert set(calls) == {False}


def test_gate_and_up_get_no_gradient():
    """It would be arrays of zeros, which a barrier before a copy to the host would have XLA write."""
    chain = in_fp8().layers[0].segments()
    assert without_gradient(chain, differentiated(chain, KEPT)) == {"gate", "up"}
    assert not _differentiable(("gate", "mid"), [jnp.zeros(2)] * 2, {"gate"}).keys() - {"mid"}


@pytest.mark.parametrize(
    "model",
    [
        lambda: in_fp8(targets=["gate_proj", "down_proj"]),
        lambda: in_fp8(lora_dropout=0.5),
        lambda: in_fp8(use_dora=True),
        lambda: adapted_model(golden_model("qwen3"), r=3, target_modules=NAMES),
    ],
    ids=["one without an adapter", "dropout", "DoRA", "arrays"],
)
def test_others_are_differentiated_alone(model):
    assert [segment.name for segment in segments_of(model())][-2:] == ["expand", "contract"]


@pytest.mark.parametrize("up", [None, in_e4m3(jnp.ones((2, 128)))], ids=["recomputed", "in FP8"])
def test_where_memory_is_short_each_is_differentiated_alone(up):
    """As both at once need more of it."""
    saved = {"gate": jnp.zeros(1), **({} if up is None else {"up": up})}
    assert [segment.name for segment in segments_of(in_fp8(), saved)][-2:] == ["expand", "contract"]


def test_it_takes_the_low_rank_inputs_of_both():
    chain = in_fp8().layers[0].segments()
    *others, joined = differentiated(chain, KEPT)
    assert joined.name == "mlp" and others == list(chain[:-2])
    first, second = (low_rank_inputs(segment) for segment in chain[-2:])
    assert low_rank_of(joined, chain, {first: (1,), second: (2,)}) == (1, 2)
    assert low_rank_of(joined, chain, {second: (2,)}) is None
    assert low_rank_of(chain[0], chain, {low_rank_inputs(chain[0]): (3,)}) == (3,)


@pytest.mark.full
def test_the_backward_multiplies_by_no_a(monkeypatch, one_by_one):
    """It takes what the forward has made."""
    model, counts = in_fp8(), []
    product = reference._product

    def counted(x, weight, contract, dtype=None):
        counts[-1] += contract == (1, 1) and weight.shape[0] in (3, 6)
        return product(x, weight, contract, dtype)

    monkeypatch.setattr(reference, "_product", counted)
    for prepare in (jax.clear_caches, one_by_one):
        prepare()
        counts.append(0)
        stack_gradients(model, KEEP, SHAPE)
    assert counts[0] == counts[1] > 0
