"""Positions of documents with pictures, beside transformers' own of the Qwen families."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.conversations.picture_processors import PictureProcessor

torch = pytest.importorskip("torch")

SETTINGS = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2}
PICTURES = st.tuples(st.integers(1, 6), st.integers(1, 6))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl"])
def test_positions_equal_get_rope_index(family):
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["_"])
    model_class = next(v for k, v in vars(module).items() if hasattr(v, "get_rope_index") and k.endswith("Model"))
    model = types.SimpleNamespace(
        config=types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2))
    )
    model.get_vision_position_ids = types.MethodType(model_class.get_vision_position_ids, model)
    processor = PictureProcessor.of({"image_token_id": 9}, SETTINGS, {}.get)

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.lists(st.tuples(st.integers(1, 5), PICTURES), max_size=4), st.integers(0, 5))
    def check(pictures, tail):
        kinds, starts, grids = [], [], []
        for texts, (rows, columns) in pictures:
            kinds += [0] * texts
            starts.append(len(kinds))
            grids.append((2 * rows, 2 * columns))
            kinds += [1] * (rows * columns)
        kinds += [0] * tail
        if not kinds:
            return
        grid = torch.tensor([[1, *sides] for sides in grids]) if grids else None
        ids = torch.zeros(1, len(kinds), dtype=torch.long)
        theirs, _ = model_class.get_rope_index(model, ids, torch.tensor([kinds], dtype=torch.int), grid)
        ours = processor.positions(len(kinds), starts, grids)
        assert np.array_equal(ours.T, theirs[:, 0].numpy())
        for cut in itertools.chain(starts, [len(kinds) - tail]):
            assert np.array_equal(processor.positions(cut, starts, grids), ours[:cut])

    check()
