"""The parts of JAX that jaxtune uses and that are not public. They may change with any release, so this file is what an
upgrade of JAX has to be read against; but for `private_mlir` beside it, no other file imports them.

    ClusterEnv                 finds the address of a cluster's first process, as jax.distributed.initialize does.
    CacheInterface             the class of the stores of the persistent compilation cache, and
    compilation_cache          its module: JAX has no public way to be given a store, and ours checks what it reads.
    config                     use_shardy_partitioner chooses the partitioner of one program; the public option that of
                               the process.
    distributed                global_state tells what processes there are. The public functions start JAX's backend,
                               which a process must not do before it has joined the others.
    fused_attention_stablehlo  cuDNN's attention. The public jax.nn.dot_product_attention takes no packed rows together
                               with a window, and keeps the statistics that a backward pass needs to itself.
    lib                        cuda_versions tells the versions of the CUDA libraries that are loaded.
"""

from jax._src import compilation_cache as compilation_cache
from jax._src import config as config
from jax._src import distributed as distributed
from jax._src import lib as lib
from jax._src.clusters import ClusterEnv as ClusterEnv
from jax._src.compilation_cache_interface import CacheInterface as CacheInterface
from jax._src.cudnn import fused_attention_stablehlo as fused_attention_stablehlo
