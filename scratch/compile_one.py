"""OUT LAYERS WIDTH [FLAG=VALUE]: texts of the sampler's programs of one row, compiled ahead."""
import sys, os
os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
sys.path.insert(0, ".")
import jax, jax.numpy as jnp, numpy as np
from tests.gpu.aot.test_sampling import structure_and_shapes
from tests.gpu.aot.target import H200
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.sampling import Kind
out, layers, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
flags = dict(a.split("=") for a in sys.argv[4:])
structure, shapes = structure_and_shapes("llama-3.1-8b", layers, False, None)
where = H200.sharding()
def placed(tree): return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)
def ints(*s): return jax.ShapeDtypeStruct(s, jnp.int32, sharding=where)
with H200.lowering():
    p, leaves = device.programs_of(False, 1), list(placed(shapes))
    states = placed(device.states_shape(structure, shapes, 1, 768))
    staged = placed(device.states_shape(structure, shapes, 1, width))
    live = device.Live(ints(1), ints(1), placed(jax.ShapeDtypeStruct((1,), bool)))
    rows = placed(device.empty_rows(1, 4, structure.config.vocab_size))
    low = {"prefill": p.prefill.lower(structure, width, leaves, ints(1, width), ints(1), ints(1)),
           "insert": p.insert.lower(states, staged, ints(1), ints(1)),
           "decode": p.decode.lower(structure, Kind(True, False, False), 8, leaves, states, live, None, placed(jax.ShapeDtypeStruct((1,), bool)), live, rows)}
    for name, l in low.items():
        c = l.compile(compiler_options=flags) if flags else l.compile()
        open(f"{out}_{name}.txt", "w").write(c.as_text())
