"""The planner's predicted peak beside the compiler's figure, for a H200, whether there is one or not.

    python benchmarks/train/predictions.py [--cases 0,3] --output FILE.json        (in the environment of `make aot`)

The compiler's figure is memory_analysis of the train step's two programs and what lies beside their arguments. Programs
are compiled with few layers and extended by what two more layers add: peaks are linear in the number of layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # programs for an absent device cannot be read back
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.shapes import SHAPES
from jaxtune.models.registry import config_from_hf
from jaxtune.train import optimizer_offload
from jaxtune.train.config import AdapterConfig, DataConfig, MemoryConfig, ModelConfig, OptimConfig, TrainConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.optim import make_optimizer, update_bound, weight_storage
from jaxtune.train.planning import cost, forecasts
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.plan import StepPlan, parse_residuals
from jaxtune.train.programs import compiler_options
from jaxtune.train.schedule import learning_rate_schedule
from jaxtune.train.step import StepProgram

ADAMW = OptimConfig()
# shape, rows of a micro-batch, length, LoRA rank (0: all trains), base, plan; and the optimizer where it is not adamw.
CASES: list[tuple[Any, ...]] = [
    ("llama-3.2-1b", 8, 2048, 0, None, "keep"),
    ("llama-3.2-3b", 8, 4096, 16, None, "gate=recompute, up=recompute"),
    ("llama-3.1-8b", 8, 2048, 16, "nf4", "keep"),
    ("llama-3.1-8b", 2, 8192, 16, "nf4", "recompute, layer_input=offload"),
    ("llama-3.1-8b", 1, 65536, 16, "nf4", "recompute, attention_out=keep, lse=keep"),
    ("qwen3-14b", 4, 4096, 16, "nf4", "recompute"),
    ("qwen3-32b", 4, 2048, 16, "nf4", "gate=offload, up=offload"),
    ("qwen3-32b", 1, 65536, 16, "nf4", "recompute, layer_input=offload"),
    ("gpt-oss-20b", 8, 2048, 16, "nf4", "keep"),
    ("qwen3-30b-a3b", 8, 2048, 16, None, "keep"),
    ("llama-3.1-8b", 2, 2048, 0, None, "keep", OptimConfig(name="adamw_8bit")),
    ("llama-3.1-8b", 2, 2048, 0, None, "keep", OptimConfig(offload=True)),
]
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes of a step by the compiler: of each program beside its arguments; of what is always there; by the planner.

    host: pinned, of the larger program.
    """

    accumulate: float
    update: float
    fixed: float
    predicted: float
    host: float

    @property
    def peak(self) -> float:
        return self.fixed + max(self.accumulate, self.update)

    def extended(self, more: Compiled, times: float) -> Compiled:
        """The figures with what lies between these and `more` added so many times."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(more), strict=True)
        return Compiled(*(a + (b - a) * times for a, b in pairs))


def planned(
    target: Any, shape: str, layers: int, rows: int, length: int, rank: int, load_in: str | None, plan: str,
    optim: OptimConfig = ADAMW,
) -> tuple[TrainConfig, Any, cost.StepCost, forecasts.Forecast]:  # fmt: skip
    """(config, abstract model, step cost, forecast) of a step of `layers` layers of a shape, one micro-batch."""
    hf = SHAPES[shape] | {"num_hidden_layers": layers}
    experts = EXPERTS if config_from_hf(hf).moe is not None else None
    config = TrainConfig(
        model=ModelConfig(path=shape, load_in=load_in),  # type: ignore[arg-type]
        data=DataConfig(train="none", length=length),
        adapter=AdapterConfig(r=rank, target_parameters=experts) if rank else None,
        rows_per_step=rows,
        steps=10,
        micro_batches=1,
        memory=MemoryConfig(plan=plan),
    )
    if not rank:  # as the whole model would have it
        whole = nnx.split(cost.abstract_model(config_from_hf(SHAPES[shape]), config), nnx.Param, ...)[1]
        storage = weight_storage(optim.weights, config.precision, sum(a.size for a in jax.tree.leaves(whole)))
        optim = dataclasses.replace(optim, weights=storage)
    config = dataclasses.replace(config, optim=optim)
    model = cost.abstract_model(config_from_hf(hf), config)
    parts = cost.step_cost(model, config)
    step_plan = StepPlan(parse_residuals(plan, layers, parts.known), 1, 2**26 // parts.vocab_size)
    return config, model, parts, forecasts.forecast(parts, step_plan, find_device(target.kind))


def compiled_step(target: Any, *case: Any) -> Compiled:
    """The step of `planned`, compiled for `target`."""
    config, model, parts, predicted = planned(target, *case)
    optim, step_plan, (rows, length) = config.optim, predicted.plan, (parts.rows, parts.length)
    schedule = learning_rate_schedule(config.schedule, 1e-4, 10)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    program = StepProgram(
        graph,
        make_optimizer(optim, schedule),
        schedule,
        plan=step_plan.residuals,
        max_documents=1,
        chunk_tokens=step_plan.chunk_tokens,
        weights=optim.weights or "fp32",
        bound=update_bound(optim, config.max_grad_norm),
        by_tensor=config.adapter is None,
        offload=optim.offload,
    )
    where = target.sharding()
    host = target.on_host(where)

    def placed(tree, where=where):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)

    state = placed(jax.eval_shape(lambda t: program.init(t, 0), trainable))
    if optim.offload:
        opt_state = jax.tree.map(lambda a: placed(a, host) if optimizer_offload.is_hosted(a) else a, state.opt_state)
        state = dataclasses.replace(state, opt_state=opt_state)
    sums = placed(jax.eval_shape(program.zero_sums, state.trainable))
    batch, index = placed(Batch.empty(rows, length)), placed(jax.ShapeDtypeStruct((), jnp.int32))
    options = compiler_options("gpu", deterministic=False)
    with target.lowering():
        lowered = (
            jax.jit(program.accumulate, donate_argnums=0).lower(sums, state, placed(frozen), batch, index),
            jax.jit(program.update, donate_argnums=(0, 1)).lower(state, sums),
        )
    found = [one.compile(compiler_options=options).memory_analysis() for one in lowered]
    needs = [m.temp_size_in_bytes + max(m.output_size_in_bytes - m.alias_size_in_bytes, 0) for m in found]
    on_host = max(m.host_temp_size_in_bytes + m.host_argument_size_in_bytes for m in found)
    return Compiled(*needs, parts.fixed_bytes(1), predicted.peak_bytes, on_host)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(str(i) for i in range(len(CASES))))
    parser.add_argument("--layers", type=int, default=4, help="the smaller number of layers that is compiled")
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    from benchmarks.record import environment, write
    from tests.gpu.aot.target import H200

    results = []
    for case in (CASES[int(i)] for i in options.cases.split(",")):
        shape, *rest = case
        count = SHAPES[shape]["num_hidden_layers"]
        few, more = (compiled_step(H200, shape, n, *rest) for n in (options.layers, options.layers + 2))
        whole = few.extended(more, (count - options.layers) / 2)
        predicted = planned(H200, shape, count, *rest)[-1].peak_bytes
        fields = ("shape", "rows", "length", "adapter_rank", "load_in", "plan", "optim")
        result = dict(zip(fields, case)) | {
            "layers": count,
            "compiled_gb": whole.peak / 1e9,
            "predicted_gb": predicted / 1e9,
            "predicted_over_compiled": predicted / whole.peak,
            "update_gb": (whole.fixed + whole.update) / 1e9,
            "host_gb": whole.host / 1e9,
        }
        if "optim" in result:
            result["optim"] = dataclasses.asdict(result["optim"])
        results.append(result)
        print(result, flush=True)
    ratios = [result["predicted_over_compiled"] for result in results]
    record = {"benchmark": "train/predictions", **environment(), "device": H200.kind, "compiled_without_device": True}
    write(options.output, record | {"cases": results, "smallest_ratio": min(ratios), "largest_ratio": max(ratios)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
