"""The table of per-layer embeddings (Gemma 4 E2B and E4B) in host memory, of which the device gets the rows of the
tokens of each batch. It is the largest tensor of these models (5.6 GB of E4B), and a token needs one row of it.

The functions take an nnx.State of a Decoder, in which the table is the variable `per_layer.weight`: `table_of` reads it
and `with_table` replaces it. On the host it is a numpy array, and in the state that a program then gets it has no rows
(`without_table`)."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

type Array = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # of the device, of the host, or only its shape

_PATH = ("per_layer", "weight")


def table_of(state: nnx.State) -> Array | None:
    """The table of per-layer embeddings in a Decoder's `state`, [vocabulary, layers * size]; None if the state has
    none, as that of another family, or the frozen part of a state whose table is trained. It is a numpy array in host
    memory if the run keeps it there, else an array on the device or only its shape. TrainedModel asks it which table to
    move, or to give to the programs apart. The planner has a function of its own with this name."""
    return next((variable.get_value() for path, variable in nnx.to_flat_state(state) if path == _PATH), None)


def with_table(state: nnx.State, table: Array) -> nnx.State:
    """A new state with `table` in place of the table of `state`, which has one; all other variables are the same. A run
    moves the table to the host or to the device so."""

    def one(path, variable):
        found = tuple(getattr(key, "key", None) for key in path) == _PATH
        return variable.replace(table) if found else variable

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def without_table(state: nnx.State) -> nnx.State:
    """A new state whose table has no rows, only the width and dtype of the table of `state`, which has one. A program
    that gets it computes with the rows that it is given beside the tokens. A run whose table is on the host gives it to
    its programs."""
    table = table_of(state)
    assert table is not None
    return with_table(state, np.zeros((0, table.shape[1]), table.dtype))
