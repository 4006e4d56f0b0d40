"""Speed and memory of one train step: a published shape, random weights made on the device, random tokens.

    python benchmarks/train/step.py [--shape llama-3.1-8b] [--rows 8] [--length 2048]
                                    [--documents full|packed|pairs|FILE] [--objective sft|dpo|dpo_precomputed]
                                    [--load-in nf4|fp8|mxfp4] [--compute fp8] [--qat int4]
                                    [--precision norms=fp32,layers.0.*=bf16]
                                    [--plan keep|recompute|...|auto] [--budget-gb 24] [--micro-batches 1]
                                    [--data 1] [--fsdp 1] [--output FILE.json]

The programs are the Trainer's own. Each record holds tokens/s (all slots), model FLOP utilisation, peak memory of the
process, compile seconds (cold, in a process of its own that fills the compilation cache; cached, in the measured
process, which starts with that cache), what the planner and the compiler said that it would need, and what proves that
it trained. benchmarks/train/memory.py runs many cases of it. Run one case a process: the peak is the process's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from flax import nnx

import jaxtune
import jaxtune.profile
from benchmarks.peers.documents import read_documents
from benchmarks.random_model import in_blocks, in_one_piece, random_model
from benchmarks.record import environment, honest, write
from benchmarks.serial import serial_transfers
from benchmarks.shapes import SHAPES
from jaxtune.models.components import stored_as
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import compute_in_fp8
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf
from jaxtune.pallas import dispatch
from jaxtune.pallas.format_names import LOAD_IN, QAT_GROUPS
from jaxtune.system import host_memory
from jaxtune.system.heap import frozen_heap
from jaxtune.train.config import (
    AdapterConfig,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.qat import QatConfig
from jaxtune.train.data import TokenDataset
from jaxtune.train.data.packing.pairs import PairDataset
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.engine.programs import Programs
from jaxtune.train.planning.cost import abstract_model
from jaxtune.train.planning.devices import device_peak_flops, memory_peak_bytes
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.leaves import Leaves
from jaxtune.train.trainer import Trainer

PROFILED_STEPS = 3
KINDS = ("full", "packed", "pairs")  # of random documents
OBJECTIVES = {
    "sft": ObjectiveConfig(),
    "dpo": ObjectiveConfig("dpo"),
    "dpo_precomputed": ObjectiveConfig("dpo", precompute_ref_log_probs=True),
}


def documents_of(kind: str, rows: int, length: int, vocab_size: int) -> Documents:
    """`full`: every row one document. `pairs`: two of half a row each. `packed`: log-normal lengths of mean 512, sigma
    0.8, like instruction data. Else a file of real ones (benchmarks/peers/documents.py)."""
    if kind not in KINDS:
        return Documents.gather([np.asarray(ids) for ids in read_documents(Path(kind), length)])
    rng = np.random.default_rng(0)
    lengths = [length // 2] * (4 * rows) if kind == "pairs" else [length] * (2 * rows)
    if kind == "packed":
        lengths = np.clip(rng.lognormal(np.log(512) - 0.32, 0.8, 6 * rows * length // 512), 16, length).astype(int)
    return Documents.gather([rng.integers(0, vocab_size, n) for n in lengths])


def adapter_config(options) -> AdapterConfig | None:
    """LoRA on all linears, and on the experts of a model that has them."""
    if not options.rank:
        return None
    has_experts = config_from_hf(SHAPES[options.shape]).moe is not None
    return AdapterConfig(
        r=options.rank,
        lora_alpha=options.rank,
        target_parameters=("experts.gate_up_proj", "experts.down_proj") if has_experts else None,
    )


def precision_map(options) -> dict[str, str]:
    """{pattern of modules: dtype or format} of --precision; {} without one."""
    return dict(pair.split("=") for pair in options.precision.split(",")) if options.precision else {}


def abstract(options) -> Decoder:
    """The model of a case, with its adapters, as shapes: for plans, and programs that are compiled ahead."""
    model = abstract_model(config_from_hf(SHAPES[options.shape]), StepSpec.of(train_config(options)).model)
    return nnx.eval_shape(in_blocks, model) if options.scales == "blocks" else model


def train_config(options) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(path=options.shape, load_in=options.load_in, compute=options.compute),
        data=DataConfig(train="random tokens", length=options.length),
        adapter=adapter_config(options),
        steps=options.steps + 3,
        precision={"*": "bf16", **precision_map(options)},
        rows_per_step=options.rows,
        micro_batches=options.micro_batches,
        mesh=MeshConfig(data=options.data, fsdp=options.fsdp, gradient_sync=options.gradient_sync),
        optim=OptimConfig(name=options.optim, offload=options.optim_offload),
        objective=OBJECTIVES[options.objective],
        qat=QatConfig(options.qat) if options.qat else None,
        memory=MemoryConfig(
            plan=None if options.plan == "auto" else options.plan,
            budget_gb=options.budget_gb and options.budget_gb * 1e9 / 2**30,
        ),
        output=tempfile.mkdtemp(),
    )


def dataset_of(options, vocab_size: int) -> TokenDataset:
    documents = documents_of(options.documents, options.rows, options.length, vocab_size)
    kind = TokenDataset if options.objective == "sft" else PairDataset
    return kind(documents, Summary(), options.length)


def make_trainer(options, model) -> Trainer:
    return Trainer(model, None, train_config(options), dataset_of(options, model.config.vocab_size), keeps_model=False)


def build(options) -> Trainer:
    """The trainer of a random model."""
    mesh = None if options.fsdp == 1 else partition.make_mesh(options.data, options.fsdp)
    words, tables_on_host = precision_map(options), bool(options.rank) and mesh is None
    load_in, in_budget = None if words else options.load_in, bool(options.budget_gb) and mesh is None
    model = random_model(SHAPES[options.shape], jax.random.key(0), load_in, mesh, tables_on_host, in_budget)
    if words:
        model = stored_as(model, words, options.load_in)
    if options.scales == "blocks":
        model = in_blocks(model)
    if options.compute == "fp8":
        model = compute_in_fp8(model)
    if in_budget:
        model = in_one_piece(model, tables_on_host)
    adapter = adapter_config(options)
    if adapter is not None:
        model = jaxtune.get_peft_model(model, **adapter.settings)
    return make_trainer(options, model)


def compile_step(trainer: Trainer, options) -> Programs:
    with serial_transfers() if options.serial_transfers else contextlib.nullcontext():
        return trainer.engine.fit(lambda: trainer.model.first_shapes(trainer.engine), 0, print)


def parts_of(trace: str) -> dict:
    """ms of a profiled step: {"categories": [[name, ms]], "scopes": [[name, phase, ms]], "transfers": [[name, ms, of
    which under no kernel]]}."""
    report = jaxtune.profile.show(trace)
    return {
        "categories": [[row.name, round(row.ms, 2)] for row in report.categories],
        "scopes": [[row.name, row.phase, round(row.ms, 2)] for row in report.scopes[:12]],
        "transfers": [[row.name, round(row.ms, 2), round(row.exposed_ms, 2)] for row in report.transfers],
    }


def cached_programs(options) -> set[str]:
    """Names in the cache of compiled programs, but for the times of their last use."""
    return {path.name for path in Path(options.cache).glob("*-cache")}


def rate(arrivals: list[float]) -> float:
    """Seconds between losses, the median slope of all pairs (Theil-Sen): the host sees single ones early or late."""
    pairs = itertools.combinations(enumerate(arrivals), 2)
    return statistics.median((late - early) / (j - i) for (i, early), (j, late) in pairs)


class Rows:
    """The rows of the steps that are timed: those of two steps, loaded before them; or, with tables of embeddings on
    the host, each step's own, which a thread loads while the step before is computed, as in a run."""

    def __init__(self, engine):
        loaded = [engine.load_step(step) for step in range(2)]
        self.counts = [counts for _, counts in loaded]
        self._engine, self._pool = engine, ThreadPoolExecutor(1)
        self._loaded = None if engine.tables else [parts for parts, _ in loaded]
        self._next: Future | None = None

    def of(self, number: int):
        if self._loaded is not None:
            return self._loaded[number % 2]
        if self._next is None:
            self.dispatched(number - 1)
        assert self._next is not None
        (parts, _), self._next = self._next.result(), None
        return parts

    def dispatched(self, number: int) -> None:
        """The device computes this step, and has finished the one before."""
        if self._loaded is None:
            self._next = self._pool.submit(self._engine.load_step, (number + 1) % 2)


def profiled(folder: str, step, state, sums) -> None:
    """A trace of some steps: (number, state, sums) -> (state, sums, metrics), which are the last ones of theirs."""
    with jax.profiler.trace(folder):
        for number in range(PROFILED_STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                state, sums, latest = step(number, state, sums)
        float(latest["loss"])


def compared(shape: dict, options) -> dict:
    """What a run was asked for, by which runs are compared."""
    return {
        "shape": options.shape,
        "vocab_size": shape["vocab_size"],
        "load_in": options.load_in,
        "compute": options.compute,
        "qat": options.qat,
        **({"precision": precision_map(options)} if options.precision else {}),
        "scales": options.scales,
        "adapter_rank": options.rank,
        "rows": options.rows,
    }


def measure(options) -> dict:
    shape = SHAPES[options.shape]
    started = time.perf_counter()
    trainer = build(options)
    init_seconds = time.perf_counter() - started
    had = cached_programs(options)
    programs = compile_step(trainer, options)
    cold = cached_programs(options) != had
    state, sums, frozen = trainer.model.first_state(trainer.engine)
    trainer.fill_references((trainer.train_data,), state, frozen)
    trainer.model.release()  # as the command does
    parts = trainer.engine.load_step(0)[0]
    state, sums = trainer.engine.flat(state, sums)
    frozen = Leaves.of(frozen)
    programs, sums, frozen, parts = trainer.engine.first_step(programs, sums, state, frozen, parts, 0, print)
    sums = trainer.engine.flat(state.tree, trainer.engine.zero_sums(state.tree))[
        1
    ]  # the step itself is timed with the others
    parts, rows = None, Rows(trainer.engine)

    def step(number, state, sums):
        return programs.update(state, trainer.engine.accumulate(programs, sums, state, frozen, rows.of(number)))

    losses, norms, arrivals = [], [], []
    for number in range(3):
        state, sums, latest = step(number, state, sums)
        losses.append(float(latest["loss"]))
        norms.append(np.asarray(latest["grad_norms"]))
    waiting = None
    with frozen_heap():  # as the loop does: garbage collections stall models of many arrays for 0.1 to 0.3 s
        begun = time.perf_counter()
        for number in range(options.steps):
            state, sums, latest = step(number, state, sums)
            if waiting is not None:  # as the loop does: a step late
                float(waiting)
                arrivals.append(time.perf_counter() - begun)
            waiting = latest["loss"]
            rows.dispatched(number)
    float(waiting)
    if options.profile:  # which slows a step
        profiled(options.profile, step, state, sums)
    step_seconds = rate(arrivals)
    flops = statistics.mean(trainer.flops(counts["lengths"]) for counts in rows.counts)
    peak_flops = device_peak_flops(jax.devices()[0].device_kind)  # of one device
    slots = options.rows * options.length
    planner = trainer.planner
    by_step_2 = np.maximum(norms[0], norms[1])
    peaks = [memory_peak_bytes(device) / 1e9 for device in range(trainer.mesh.size)]
    return {
        "benchmark": "train/step",
        **environment(),
        **compared(shape, options),
        "mesh_data": trainer.mesh.shape["data"],
        "mesh_fsdp": trainer.mesh.shape["fsdp"],
        "length": options.length,
        "documents": Path(options.documents).name,
        "objective": options.objective,
        "max_documents": trainer.program.max_documents,
        "attention": dispatch.record["attention"][0],
        "residuals": planner.plan.text,
        "micro_batches": planner.plan.micro_batches,
        **{what: place for what, place in planner.plan.to_record().items() if place in ("host", "device")},
        "budget_gb": options.budget_gb,
        "predicted_peak_gb": planner.forecast.peak_bytes / 1e9,
        "compiled_peak_gb": planner.compiled_bytes(programs.accumulate, programs.update) / 1e9,
        "predicted_tokens_per_second": planner.forecast.tokens_per_second,
        "compilations": planner.compilations,
        "optimizer": options.optim,
        "host_gb": programs.accumulate.memory_analysis().host_temp_size_in_bytes / 1e9,  # of residuals
        "step_seconds": step_seconds,
        "step_seconds_all": [round(b - a, 5) for a, b in itertools.pairwise(arrivals)],
        "tokens_per_second": slots / step_seconds,
        "real_tokens_per_second": statistics.mean(counts["tokens"] for counts in rows.counts) / step_seconds,
        "tokens_per_second_per_gpu": slots / step_seconds / trainer.mesh.size,
        "mfu": None if peak_flops is None else flops / step_seconds / (peak_flops * trainer.mesh.size),
        "peak_memory_gb": max(peaks),
        "peak_memory_gb_of_each": peaks,
        "compile_seconds_cold": programs.seconds if cold else None,
        "compile_seconds_cached": None if cold else programs.seconds,
        "init_seconds": init_seconds,
        "first_loss": losses[0],
        "losses": losses,
        "smallest_grad_norm_by_step_2": float(by_step_2.min()),
        **({"parts": parts_of(options.profile)} if options.profile else {}),
    }


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--data", type=int, default=1, help="mesh.data; rows are those of a step, over all devices")
    parser.add_argument("--fsdp", type=int, default=1, help="mesh.fsdp")
    parser.add_argument("--gradient-sync", default="fp32", choices=["fp32", "bf16", "int8", "int4"])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--documents", default="full", help=f"{', '.join(KINDS)}, or a file of token ids")
    parser.add_argument("--objective", default="sft", choices=list(OBJECTIVES), help="dpo goes with --documents pairs")
    parser.add_argument(
        "--rank", type=int, default=16, help="LoRA rank on all linears and experts; 0: full fine-tuning"
    )
    parser.add_argument(
        "--load-in",
        choices=LOAD_IN,
        help="the layers' weights in few bits; mxfp4: the experts' alone; default: bfloat16",
    )
    parser.add_argument("--compute", choices=["fp8"], help="weights in FP8 multiply as they are stored")
    parser.add_argument("--qat", choices=list(QAT_GROUPS), help="weights are rounded to this format in the forward")
    parser.add_argument("--precision", help="a precision map of modules: pattern=word, several with commas between")
    parser.add_argument(
        "--scales", choices=["rows", "blocks"], default="rows", help="of FP8: jaxtune's, or official checkpoints'"
    )
    parser.add_argument(
        "--plan", default="keep", help="memory.plan: what becomes of residuals; auto: the planner's choice"
    )
    parser.add_argument(
        "--budget-gb", type=float, help="of the device, in 1e9 bytes; memory.py also holds the allocator to it"
    )
    parser.add_argument("--micro-batches", type=int, help="default: the planner's choice")
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--optim-offload", action="store_true", help="optimizer states in host memory")
    parser.add_argument(
        "--serial-transfers", action="store_true", help="an ablation: copies do not overlap with compute"
    )
    parser.add_argument("--steps", type=int, default=12, help="but for the first and the last, they are timed")
    parser.add_argument(
        "--cache", help="folder of compiled programs; default: an empty one, filled by a process of its own"
    )
    parser.add_argument("--profile", help="folder for a trace of more steps; the record says their parts")
    parser.add_argument("--output")
    return parser


def cold_compile(options) -> float | None:
    """Seconds of a compile in a process of its own, which fills options.cache; None where a folder was named."""
    if options.cache:
        return None
    options.cache = tempfile.mkdtemp()
    # This process has not touched the device yet: the child has the whole memory.
    script = Path(__file__).with_name("compile_ahead.py")
    child = [sys.executable, str(script), options.cache, shlex.join(sys.argv[1:])]
    done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def prepare(cache: str) -> None:
    """Before JAX starts: host memory is pinned, and compiled programs are kept in this folder."""
    host_memory.allow_pinned()
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def main() -> int:
    options = arguments().parse_args()
    cold_seconds = cold_compile(options)
    prepare(options.cache)
    record = measure(options)
    if cold_seconds is not None:
        record["compile_seconds_cold"] = cold_seconds
    problem = honest(record)
    if problem is not None:
        record["rejected"] = problem
    if options.output:
        write(options.output, record)
    print(json.dumps({k: v for k, v in record.items() if not isinstance(v, list)}))
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
