"""Tables of embeddings in host memory, of which a device gets the rows of a batch's tokens. They are the largest
tensors of their models (1.1 GB of an 8B, 5.6 GB of Gemma 4 E4B). A table has the name of the Decoder's attribute that
holds its `weight`, and is a numpy array on the host. Programs get a state in which it has no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from jaxtune.models.placement import gathers

type Array = jax.Array | np.ndarray | jax.ShapeDtypeStruct  # of the device, of the host, or only its shape

# {name: what reports and errors call the table}
TITLES = {"embedding": "token embedding", "per_layer": "table of per-layer embeddings"}


def rows_of(
    name: str,
    variable: nnx.Variable,
    tokens: jax.Array,
    lookup: Callable[[jax.Array, jax.Array], jax.Array],
    rows: jax.Array | None = None,
) -> jax.Array:
    """The rows [B, T, size] of a table, in the table's dtype. A numpy table is looked up on the host without `lookup`,
    but becomes a constant of a traced program.

      name: of the table, a key of TITLES, for the error.
      variable: [vocabulary, size]; without rows in a program whose table is on the host.
      tokens: int32[B, T].
      lookup: (table, tokens) -> rows, with its derivative.
      rows: the result, if it is known; None: they are looked up.

    Raises ValueError if the table has no rows and `rows` is None.
    """
    if rows is not None:
        return rows
    if has_no_rows(variable):
        raise ValueError(f"the {TITLES[name]} is on the host: this pass must be given its rows")
    table = variable.get_value()
    if isinstance(table, np.ndarray) and not isinstance(tokens, Tracer):
        return jnp.asarray(table[np.asarray(tokens)])
    return gathers.rows_of(variable, tokens, lookup)


def has_no_rows(variable: nnx.Variable) -> bool:
    """Whether a run has the table on the host, so that a pass must be given the rows of its tokens."""
    return variable.shape[0] == 0


def tables_of(state: nnx.State, names: Collection[str]) -> dict[str, Array]:
    """{name: array [vocabulary, size]} of the named tables that a Decoder's state has; it may be a part."""
    flat = {path: variable for path, variable in nnx.to_flat_state(state) if path[-1] == "weight"}
    return {name: flat[name, "weight"].get_value() for name in names if (name, "weight") in flat}


def with_tables(state: nnx.State, tables: Mapping[str, Array]) -> nnx.State:
    """A new state with `tables` in place of its own."""

    def replaced(path, variable):
        name, *attributes = (str(getattr(key, "key", None)) for key in path)
        return variable.replace(tables[name]) if name in tables and attributes == ["weight"] else variable

    return jax.tree_util.tree_map_with_path(replaced, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def without_rows(state: nnx.State, tables: Mapping[str, Array]) -> nnx.State:
    """A new state in which the tables keep only their width and dtype."""
    return with_tables(state, {name: np.zeros((0, table.shape[1]), table.dtype) for name, table in tables.items()})
