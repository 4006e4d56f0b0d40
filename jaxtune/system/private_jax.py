"""JAX's private names, all imported here (and in `private_mlir`): any release may change them. Why each:

ClusterEnv: the address of a cluster's first process.
CacheInterface, compilation_cache: replacing the store of compiled programs.
mlir: what lowers a primitive, which decides a program.
xla_client: what tells a machine's devices from others.
config: use_shardy_partitioner for one program, not the process; the settings on which traces depend.
distributed: global_state; public functions start the backend, before joining.
fused_attention_stablehlo: cuDNN attention with windows in packed rows and statistics for a backward pass.
lib: cuda_versions, of the loaded CUDA libraries; cuda_path, the folder of CUDA's tools.
Device: a type.
clean_up: what JAX does at the end of a process, a seventh of a second and more.
replace, in_row_order: other memory for an array that others refer to.
read_by: the arguments that a derivative reads; gradients of others are zero.
"""

from collections.abc import Sequence

import jax
from jax._src import compilation_cache as compilation_cache
from jax._src import config as config
from jax._src import distributed as distributed
from jax._src import lib as lib
from jax._src.api import clean_up as clean_up
from jax._src.clusters import ClusterEnv as ClusterEnv
from jax._src.compilation_cache_interface import CacheInterface as CacheInterface
from jax._src.cudnn import fused_attention_stablehlo as fused_attention_stablehlo
from jax._src.interpreters import mlir as mlir
from jax._src.lib import xla_client as xla_client
from jaxlib._jax import Device as Device


def replace(array, shards: Sequence[jax.Array]) -> None:
    """Gives an array these shards, one for each device of this process, whose shapes are not checked."""
    of_shards = type(array)(array.aval, array.sharding, list(shards), committed=array._committed, _skip_checks=True)
    array._replace_with(of_shards)


def in_row_order(array) -> bool:
    """Whether its elements lie in memory as device_put places them."""
    return array.format.layout.major_to_minor == tuple(range(array.ndim))


def read_by(pullback) -> list[bool]:
    """For each leaf of the arguments of a function under jax.vjp, whether a result depends on it by a derivative."""
    jaxpr, count = pullback.jaxpr, pullback.in_tree.num_leaves
    end = len(jaxpr.invars) - len(jax.tree.leaves(pullback.structured_residuals))
    read = {id(value) for equation in jaxpr.eqns for value in equation.invars} | set(map(id, jaxpr.outvars))
    return [id(value) in read for value in jaxpr.invars[end - count : end]]
