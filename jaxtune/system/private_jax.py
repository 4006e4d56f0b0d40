"""JAX's private names that jaxtune uses. They may change with any release, so an upgrade of JAX has to be checked
against this file. Except for `private_mlir` beside it, no other file imports private names.

    ClusterEnv                 finds the address of a cluster's first process, as jax.distributed.initialize does; no
                               public function returns it.
    CacheInterface             the class of the stores of the persistent compilation cache, and
    compilation_cache          its module: JAX has no public way to replace the store, and ours verifies what it reads.
    config                     use_shardy_partitioner switches Shardy off for one program (partition.compiling); the
                               public option sets the partitioner of the process.
    distributed                global_state has the processes of the run. The public functions start JAX's backend,
                               which a process must not do before it has joined the others.
    fused_attention_stablehlo  cuDNN's attention. The public jax.nn.dot_product_attention does not support packed rows
                               with a window, and does not return the statistics that a backward pass needs.
    lib                        cuda_versions has the versions of the loaded CUDA libraries; no public function returns
                               them.
"""

from jax._src import compilation_cache as compilation_cache
from jax._src import config as config
from jax._src import distributed as distributed
from jax._src import lib as lib
from jax._src.clusters import ClusterEnv as ClusterEnv
from jax._src.compilation_cache_interface import CacheInterface as CacheInterface
from jax._src.cudnn import fused_attention_stablehlo as fused_attention_stablehlo
