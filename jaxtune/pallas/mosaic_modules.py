"""JAX's modules of Mosaic GPU. They take a fifth of a second, which a start spares whose programs are all cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import fragmented_array, utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
else:
    from jaxtune.system.later import Later

    mgpu, plgpu = Later("jax.experimental.mosaic.gpu"), Later("jax.experimental.pallas.mosaic_gpu")
    fragmented_array, utils = (Later(f"{mgpu.__name__}.{name}") for name in ("fragmented_array", "utils"))

__all__ = ["fragmented_array", "mgpu", "plgpu", "utils"]
