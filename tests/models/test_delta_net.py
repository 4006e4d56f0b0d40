"""The gated delta net's state in generation: after prompts that are shorter than the convolution's taps, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import tiny_config

from jaxtune.models.config import LayerSpec
from jaxtune.models.layers.delta_net import DeltaNet, DeltaNetShape
from jaxtune.models.layers.segment import Context
from jaxtune.pallas.attention import PackedLayout, packed_layout

LENGTHS = (1, 2, 3, 4, 7)  # of prompts: fewer tokens than taps, as many as the window has, as many as taps, and more
LONGEST, TAPS = max(LENGTHS), 4


@pytest.fixture(scope="module")
def net() -> DeltaNet:
    shape = DeltaNetShape(key_heads=1, heads=2, key_dim=8, value_dim=8, taps=TAPS)
    return DeltaNet(shape, tiny_config(), jax.random.key(0), "float32")


@pytest.fixture(scope="module")
def rows() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (len(LENGTHS), LONGEST + 2, 16))


def outputs(net, x):
    """Of whole rows, one document each."""
    context = Context(LayerSpec(), packed_layout(x.shape[:2]))
    qkv, gate, rates = net.project(x)
    return net.output(net._recur(context, qkv, rates)[0], gate)


def prompt_state(net, x, lengths):
    """The state after prompts that are padded at their ends with what is no token of them."""
    context = Context(LayerSpec(), packed_layout(x.shape[:2]))
    qkv, _, rates = net.project(x)
    return net.first_state({"qkv": qkv, "rates": rates}, jnp.asarray(lengths, jnp.int32), 2, context)


@pytest.mark.full
def test_a_prompt_of_any_length_is_followed_as_in_a_whole_row(net, rows):
    """The two tokens after a prompt, one at a time, give what they give in the row."""
    want = outputs(net, rows)
    state = prompt_state(net, rows[:, :LONGEST], LENGTHS)
    context = Context(LayerSpec(), packed_layout((len(LENGTHS), 1)))
    for more in range(2):
        at = np.array(LENGTHS) + more
        got, state = net.step(rows[np.arange(len(at)), at][:, None], state, jnp.asarray(at), context)
        np.testing.assert_allclose(got[:, 0], want[np.arange(len(at)), at], rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("counts", [(1, 2, 9), (3, 9, 4)])
def test_padding_after_the_next_tokens_changes_no_state(net, counts):
    """Each row's state after a padded piece is the one after its tokens alone; pieces of one token are a step."""
    rows = jax.random.normal(jax.random.key(2), (3, 17, 16))
    state = prompt_state(net, rows[:, :8], (3, 5, 8))
    piece = rows[:, 8:]
    ends = np.where(np.arange(9) < np.array(counts)[:, None], np.array(counts)[:, None], np.arange(9))
    starts = np.where(np.arange(9) < np.array(counts)[:, None], 0, np.arange(9))
    layout = PackedLayout(jnp.asarray(starts), jnp.asarray(ends), max_documents=1)
    out, after = net.step(piece, state, jnp.full(3, 8), Context(LayerSpec(), layout))
    for row, count in enumerate(counts):
        of_row = [part[row : row + 1] for part in state]
        context = Context(LayerSpec(), packed_layout((1, count)))
        wanted, expected = net.step(piece[row : row + 1, :count], of_row, jnp.full(1, 8), context)
        np.testing.assert_allclose(out[row, :count], wanted[0], rtol=1e-4, atol=1e-5)
        for found, other in zip(after, expected, strict=True):
            np.testing.assert_allclose(found[row], other[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2])
def test_the_window_of_a_short_prompt_has_zeros_before_its_tokens(net, rows, length):
    window, _ = prompt_state(net, rows[:1, :LONGEST], [length])
    inputs = net.project(rows[:1, :length])[0]
    assert window.shape == (1, TAPS - 1, inputs.shape[2])
    assert not window[:, : TAPS - 1 - length].any()
    np.testing.assert_allclose(window[:, TAPS - 1 - length :], inputs, rtol=1e-5, atol=1e-6)
    assert window[:, TAPS - 1 - length :].any()
