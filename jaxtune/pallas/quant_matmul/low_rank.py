"""Lets one run of a function use another run's low-rank inputs of adapters, x A^T [tokens, r]. A backward that runs a
part of a model again would otherwise read the whole input once more for each adapter.

    with kept() as made:
        out = linear(x)
    with kept(tuple(made)):
        again = linear(x)  # with the low-rank input of the first run

A function that JAX traces on its own, such as a custom_vjp, must run in `of_function`: its low-rank inputs exist only
within its trace. Where a norm made the input, the gradient of A is computed from what the norm multiplied (Factors),
and XLA does not compute the normed input again.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

# a low-rank input, [tokens, r] or an OfNormed, several of them, or None without an adapter
type LowRankInputs = jax.Array | Sequence[LowRankInputs] | None


class OfNormed(NamedTuple):
    """The low-rank input of linears whose operation norms x [tokens, in] itself."""

    inner: jax.Array  # [tokens, r], the product of the normed x and A
    of_rows: jax.Array  # float32[tokens, 1], the norm's factor of each row, as in Factors


class Factors(NamedTuple):
    """A normed input of linears as a product, which is rounded to the dtype of `rows`."""

    rows: jax.Array  # [..., in] in the input's dtype, what was normed
    of_rows: jax.Array  # float32[..., 1], the factor of each row
    of_columns: jax.Array  # float32[in], the factor of each column

    def flat(self) -> Factors:
        """Without further axes: [tokens, in]."""
        return Factors(self.rows.reshape(-1, self.rows.shape[-1]), self.of_rows.reshape(-1, 1), self.of_columns)

    def contracted(self, left: jax.Array, dtype) -> jax.Array:
        """left^T times the input, [r, in] in `dtype`.

        left: [tokens, r] in the input's dtype.
        """
        left = (left.astype(jnp.float32) * self.of_rows).astype(left.dtype)
        numbers = (((0,), (0,)), ((), ()))
        precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        sums = jax.lax.dot_general(left, self.rows, numbers, precision=precision, preferred_element_type=jnp.float32)
        return (sums * self.of_columns).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The run of a function whose low-rank inputs are collected."""

    inputs: list[LowRankInputs]  # what was computed or given so far
    earlier: (
        Iterator[LowRankInputs] | None
    )  # what an earlier run made and this one has not used yet; None: there was none
    normed: Sequence[tuple[jax.Array, Factors]]  # normed inputs, and what the norms multiplied
    trace: object  # JAX's trace in which the function runs


_current: contextvars.ContextVar[_Run | None] = contextvars.ContextVar("low_rank", default=None)


@contextlib.contextmanager
def collected(
    earlier: Sequence[LowRankInputs] | None = None, normed: Sequence[tuple[jax.Array, Factors]] = ()
) -> Iterator[list[LowRankInputs]]:
    """A context that collects low-rank inputs: a list, to which each call of `recorded` appends what it returns.

    earlier: the list of an earlier run of the same calls, whose values they return; None: they compute them.
    normed: (an input of linears, the very object; its factors) for `factors_of`.
    """
    run = _Run([], None if earlier is None else iter(earlier), normed, get_opaque_trace_state())
    token = _current.set(run)
    try:
        yield run.inputs
    finally:
        _current.reset(token)


def recorded(make: Callable[[LowRankInputs], LowRankInputs]) -> LowRankInputs:
    """What `make` returns for an earlier run's value, or None: a low-rank input [tokens, r], or a pytree of them. Both
    runs must call it in the same order. Outside of `collected`, and in a trace within it, nothing is collected.
    """
    run = _current.get()
    if run is None or run.trace != get_opaque_trace_state():
        return make(None)
    value = make(None if run.earlier is None else next(run.earlier))
    run.inputs.append(value)
    return value


def factors_of(x: jax.Array) -> Factors | None:
    """The Factors that `collected` has for the input x, if it has low-rank inputs too; else None."""
    run = _current.get()
    if run is None or run.earlier is None:
        return None
    return next((factors for value, factors in run.normed if value is x), None)


def of_function[Result](run: Callable[[LowRankInputs], tuple[Result, LowRankInputs]]) -> Result:
    """The result of a function that is traced on its own: from the low-rank inputs of an earlier run, or None, to (the
    result, the low-rank inputs).
    """
    results: list[Result] = []

    def make(earlier: LowRankInputs) -> LowRankInputs:
        result, inner = run(earlier)
        results.append(result)
        return inner

    recorded(make)
    return results[0]
