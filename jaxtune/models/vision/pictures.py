"""The pictures of a batch of packed rows."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pictures:
    """The pictures of packed rows, all arrays with rows first. A row has room for P patches; each picture's are
    consecutive and in the image processor's order, merge x merge blocks one after the other, and padding comes last. A
    block's patches become one feature, which stands at one token.

    Qwen: merge 2, F = 3 channels x 2 frames x 16 x 16 = 1,536. A picture's tokens have positions [rows, T, 3] (time,
    height, width), an argument beside this.
    """

    patches: jax.Array  # float[rows, P, F], normalised pixels; zeros at padding
    patch_segments: jax.Array  # int32[rows, P], the picture's number in its row, from 1; 0 at padding
    patch_grids: jax.Array  # int32[rows, P, 2], (height, width) of the patch's picture, in patches; 0 at padding
    patch_coordinates: jax.Array  # int32[rows, P, 2], (row, column) of the patch in its picture; 0 at padding
    # int32[rows, T], for each token the index of its feature among the row's P / (merge x merge); -1 for text
    picture_features: jax.Array
    # a static guarantee that no row has more pictures, for faster attention; None: unknown
    max_pictures: int | None = dataclasses.field(default=None, metadata=dict(static=True))
