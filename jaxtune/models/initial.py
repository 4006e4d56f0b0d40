"""How new weights begin. `as_shapes` makes modules of shapes without tracing their hundreds of draws."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_makes_shapes = contextvars.ContextVar("makes_shapes", default=False)


NO_KEY: jax.Array = None  # type: ignore[assignment]


@contextlib.contextmanager
def as_shapes(makes: bool = True) -> Iterator[None]:
    """A context in which new weights are jax.ShapeDtypeStructs, for which NO_KEY serves; makes: False: not so within
    one.
    """
    token = _makes_shapes.set(makes)
    try:
        yield
    finally:
        _makes_shapes.reset(token)


def makes_shapes() -> bool:
    return _makes_shapes.get()


def key_of(seed: int) -> jax.Array:
    return NO_KEY if makes_shapes() else jax.random.key(seed)


def split(key: jax.Array, count: int = 2) -> Sequence[jax.Array] | jax.Array:
    return [key] * count if makes_shapes() else jax.random.split(key, count)


def folded(key: jax.Array, number: int) -> jax.Array:
    return key if makes_shapes() else jax.random.fold_in(key, number)


def normal(key: jax.Array, shape: tuple[int, ...], std: float, dtype) -> jax.Array:
    return drawn(lambda: (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype), shape, dtype)


def full(shape: tuple[int, ...], value: float, dtype) -> jax.Array:
    return drawn(lambda: jnp.full(shape, value, dtype), shape, dtype)


def drawn(draw: Callable[[], jax.Array], shape: tuple[int, ...], dtype) -> jax.Array:
    """What `draw` gives, of this shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) if makes_shapes() else draw()  # type: ignore[return-value]


def cast(array: jax.Array, dtype) -> jax.Array:
    return drawn(lambda: array.astype(dtype), array.shape, dtype)


def zeros(shapes: Sequence[tuple[int, ...]], traced: bool) -> list[jax.Array]:
    """float32; not traced: from the host, as a program for each shape would take longer."""
    if traced or makes_shapes():
        return [full(shape, 0, jnp.float32) for shape in shapes]
    return jax.device_put([np.zeros(shape, np.float32) for shape in shapes])
