"""Where copies are put among the stages of a layer."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxtune.models.ferry import _MULTIPLICATIONS_PER_BYTE, cut, windows

LAYER = [1.0, 0.7, 0.8, 5.6, 3.0]  # project, attend, mix, expand, contract


def placed(copies, stages=LAYER):
    """windows of copies that take as long as these numbers say."""
    sizes = [round(copy * 1e9) for copy in copies]
    return windows(sizes, [stage * 1e9 * _MULTIPLICATIONS_PER_BYTE for stage in stages])


@pytest.mark.parametrize("copies", [[2.5], [2.5] * 3, [0.04, 0.6, 0.6, 2.5, 2.5, 2.5, 2.5], [9.0] * 4, [0.1] * 12])
def test_windows_follow_one_another(copies):
    found = placed(copies)
    assert len(found) == len(copies)
    for (first, last), (next_first, next_last) in itertools.pairwise(found):
        assert 0 <= first <= last < len(LAYER)
        assert (next_first, next_last) == (first, last) or next_first > last


def test_copies_that_a_layer_can_cover_are_covered():
    for copies in ([2.5], [2.4, 2.4, 2.4], [2.4, 2.4, 2.4, 2.4]):
        found = placed(copies)
        for window in set(found):
            inside = [copy for copy, where in zip(copies, found, strict=True) if where == window]
            assert sum(inside) <= sum(LAYER[window[0] : window[1] + 1])


def test_no_more_than_two_end_together_where_there_is_room():
    found = placed([0.1, 0.1, 0.1, 0.1, 2.0, 2.0])
    assert max(found.count(window) for window in found) <= 2


def test_no_copies_need_no_window():
    assert placed([]) == []


def test_pieces_are_as_large_as_the_longest_stage_allows():
    array = jax.ShapeDtypeStruct((64, 1 << 25), jnp.bfloat16)  # 4 GiB

    def pieces(*stages_bytes):
        stages = [count * _MULTIPLICATIONS_PER_BYTE for count in stages_bytes]
        return len(jax.eval_shape(lambda a: cut([a], stages), array)[0].arrays)

    assert pieces(4 << 30, 1e9) == 2  # two are in flight together
    assert pieces(8 << 30) == 1
    assert pieces(*[1e9] * 9) == 8  # of 512 MiB
    assert pieces(*[1e8] * 9) == 32  # of 128 MiB: the link takes longer than all stages
