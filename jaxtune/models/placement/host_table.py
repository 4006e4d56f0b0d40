"""Tables of embeddings in host memory, of which the device gets the rows of the tokens of each batch: the token
embedding, unless the head is tied to it, and the table of per-layer embeddings (Gemma 4 E2B and E4B). A token needs one
row of each, and they are the largest tensors of their models (1.1 GB of an 8B, 5.6 GB of E4B).

A table has the name of the Decoder's attribute of which it is the `weight` (Decoder.tables). On the host it is a numpy
array. The functions `tables_of`, `with_tables` and `without_rows` take an nnx.State of a Decoder: a program gets one in
which the tables on the host have no rows, and `rows_of` looks up rows wherever a table is."""

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
    take: Callable[[jax.Array, jax.Array], jax.Array],
    rows: jax.Array | None = None,
) -> jax.Array:
    """The rows [B, T, size] of a table for the tokens int32[B, T], in the table's dtype. Decoder.embed and the
    per-layer embeddings look up their rows by it.

    Of a table in host memory that is not an argument of a program (a numpy array, such as that of a model that a run
    has returned), the host looks them up without `take`, so that the device never has the whole table; in a traced
    call, where the tokens are not known, the table becomes a constant of the program.

    Args:
      name: of the table, for the error.
      variable: the table [vocabulary, size]; it has no rows if a run has it on the host and this is one of its
        programs.
      tokens: the tokens.
      take: the function (table, tokens) -> rows that looks them up on the device, and decides how the table's gradient
        is computed.
      rows: the result, if it was looked up already; None: it is looked up.
    Raises:
      ValueError: the table has no rows, and `rows` is None.
    """
    if rows is not None:
        return rows
    if has_no_rows(variable):
        raise ValueError(f"the {TITLES[name]} is on the host: this pass must be given its rows")
    table = variable.get_value()
    if isinstance(table, np.ndarray) and not isinstance(tokens, Tracer):
        return jnp.asarray(table[np.asarray(tokens)])
    return gathers.rows_of(variable, tokens, take)


def has_no_rows(variable: nnx.Variable) -> bool:
    """Whether the table `variable` has no rows, because a run has it on the host, so that a pass must be given the rows
    of its tokens: Decoder.needs_rows and `rows_of` ask it."""
    return variable.shape[0] == 0


def tables_of(state: nnx.State, names: Collection[str]) -> dict[str, Array]:
    """{name: array [vocabulary, size]} of the tables in a Decoder's `state`, of those that are named; a table that
    trains is not in the frozen part of a state. Each is a numpy array in host memory if the run keeps it there, else an
    array on the device or only its shape. TrainedModel asks it which tables to move, or to give to the programs
    apart."""
    flat = {path: variable for path, variable in nnx.to_flat_state(state) if path[-1] == "weight"}
    return {name: flat[name, "weight"].get_value() for name in names if (name, "weight") in flat}


def with_tables(state: nnx.State, tables: Mapping[str, Array]) -> nnx.State:
    """A new state with `tables` {name: array} in place of those of `state`, which has them; all other variables are the
    same. A run moves tables to the host or to the device so."""

    def one(path, variable):
        name, *rest = (str(getattr(key, "key", None)) for key in path)
        return variable.replace(tables[name]) if name in tables and rest == ["weight"] else variable

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def without_rows(state: nnx.State, tables: Mapping[str, Array]) -> nnx.State:
    """A new state in which these `tables` of `state`, {name: array}, have no rows, only their width and dtype. A
    program that gets it computes with the rows that it is given beside the tokens. A run whose tables are on the host
    gives it to its programs."""
    return with_tables(state, {name: np.zeros((0, table.shape[1]), table.dtype) for name, table in tables.items()})
