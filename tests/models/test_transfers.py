"""Where copies are put among the stages of a layer."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxtune.models.placement.transfers import _MULTIPLICATIONS_PER_BYTE, _ROOM, cut, windows

LAYER = [1.0, 0.7, 0.8, 5.6, 3.0]  # project, attend, mix, expand, contract


def placed(copies, late=False):
    """windows of copies that take as long as these numbers say."""
    sizes = [round(copy * 1e9 / _ROOM) for copy in copies]
    return windows(sizes, [stage * 1e9 * _MULTIPLICATIONS_PER_BYTE for stage in LAYER], late)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("copies", [[2.5], [2.5] * 3, [0.04, 0.6, 0.6, 2.5, 2.5, 2.5, 2.5], [9.0] * 4, [0.1] * 12])
def test_windows_follow_one_another(copies, late):
    found = placed(copies, late)
    assert len(found) == len(copies)
    for (first, last), (next_first, next_last) in itertools.pairwise(found):
        assert 0 <= first <= last < len(LAYER)
        assert (next_first, next_last) == (first, last) or next_first > last


@pytest.mark.parametrize("late", [False, True])
def test_copies_that_a_layer_can_cover_are_covered(late):
    for copies in ([2.4], [2.4, 2.4, 2.4], [2.4, 2.4, 2.4, 2.4], [10.9]):
        found = placed(copies, late)
        for window in set(found):
            inside = [copy for copy, where in zip(copies, found, strict=True) if where == window]
            assert sum(inside) <= sum(LAYER[window[0] : window[1] + 1]) + 1e-6


def test_what_comes_is_late_and_what_leaves_is_gone_early():
    assert placed([2.9], late=True) == [(4, 4)]
    assert placed([4.0], late=True) == [(3, 4)]
    assert placed([0.9], late=False) == [(0, 0)]
    assert placed([1.6], late=False) == [(0, 1)]


def test_copies_longer_than_the_layer_wait_once():
    assert set(placed([9.0] * 4)) == {(0, 4)}


def test_no_copies_need_no_window():
    assert placed([]) == []


def test_pieces_are_as_large_as_the_longest_stage_allows():
    array = jax.ShapeDtypeStruct((64, 1 << 25), jnp.bfloat16)  # 4 GiB

    def pieces(*stages_bytes):
        stages = [count * _MULTIPLICATIONS_PER_BYTE for count in stages_bytes]
        return len(jax.eval_shape(lambda a: cut([a], stages), array)[0].arrays)

    assert pieces(4 << 30, 1e9) == 1
    assert pieces(2 << 30, 1e9) == 2
    assert pieces(1e8, 1e8) == 8  # of 512 MiB
