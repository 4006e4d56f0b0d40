"""What the allocator of a card loses when a model with quantised weights is loaded: what the weights and the largest
free block leave of its memory. A step's temporary memory is one block, and cannot have the rest. Plans count nothing
for it.

    python benchmarks/train/load_gaps.py [--shape llama-3.1-8b] [--saved nf4] [--formats nf4,fp8] [--card 12]
        [--train] [--seconds 240] --output FILE.json

A folder of the shape with random weights, in 16 bits or in the format --saved, is written once, and loaded by a process
for each format (a value of model.load_in; "stored": as the folder has it), whose allocator gives out no more than a
card of --card GiB would. `lost_bytes` are in gaps between blocks in use (`in_gaps_bytes`) or in blocks that are larger
than the arrays in them (`in_blocks_bytes`; other arrays than weights, if any, count there too). `lost_share` is their
share of the quantised weights' bytes. `adapted` has the same bytes once the model has an adapter of rank 16. With
--train, the model is then trained for two steps of 8 x 2,048 tokens by the plan that is chosen for the card: `begun`
has what the allocator has before the first step, and what the step's programs ask for in one block each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def stats() -> dict[str, int]:
    """What the allocator of the device says."""
    import jax

    return jax.local_devices()[0].memory_stats() or {}


def lost(model) -> dict[str, float]:
    """Bytes that the allocator has lost, while nothing but the model is on the device."""
    from jaxtune.train.planning.layer_costs import nbytes

    now = stats()
    return {
        "weight_bytes": nbytes(model),
        "in_gaps_bytes": now["bytes_limit"] - now["bytes_in_use"] - now["largest_free_block_bytes"],
        "in_blocks_bytes": now["bytes_in_use"] - nbytes(model),
    }


def loaded(folder: str, load_in: str):
    """(the model of the folder, what the allocator then has)."""
    import jax

    import jaxtune
    from jaxtune.pallas.formats import Stored
    from jaxtune.train.planning.layer_costs import nbytes

    begun = time.monotonic()
    model, _ = jaxtune.from_pretrained(folder, load_in=load_in)
    found = {"load_seconds": time.monotonic() - begun, "stats": stats()} | lost(model)
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, Stored))
    found["quantised_bytes"] = sum(nbytes(leaf) for leaf in leaves if isinstance(leaf, Stored))
    found["lost_bytes"] = found["in_gaps_bytes"] + found["in_blocks_bytes"]
    return model, found | {"lost_share": found["lost_bytes"] / found["quantised_bytes"]}


def trained(trainer, options) -> dict:
    """Two steps of a run: what the allocator has before the first, and what a step asks for in one block."""
    from benchmarks.train.step import compile_step
    from jaxtune.train.program.leaves import Leaves

    programs = compile_step(trainer, options)
    state, sums, frozen = trainer.model.begin(trainer.engine, None)
    memories = {"step": programs.accumulate.memory_analysis(), "update": programs.update.memory_analysis()}
    found = {f"{name}_block_bytes": memory.temp_size_in_bytes for name, memory in memories.items()}
    found |= {"stats": stats(), "budget_bytes": trainer.planner.budget_bytes, "plan": trainer.planner.plan.to_record()}
    found["predicted_peak_bytes"] = trainer.planner.forecast.peak_bytes
    state, sums = trainer.engine.flat(state, sums)
    frozen = Leaves.of(frozen)
    try:
        for number in range(2):
            parts, _ = trainer.engine.load_step(number)
            sums = trainer.engine.accumulate(programs, sums, state, frozen, parts)
            state, sums, latest = programs.update(state, sums)
            found["loss"] = float(latest["loss"])
    except RuntimeError as error:
        found["failed"] = str(error)[:500]
    return found | {"stats_after": stats()}


def child(folder: str, load_in: str, shape: str, format: str, train: str) -> None:
    """Loads the folder, and prints what the allocator then has. format: that of the quantised weights. train: ""
    does not train."""
    import jax

    import jaxtune
    from benchmarks.train.step import adapter_config, arguments, make_trainer

    words = ["--shape", shape, "--load-in", format, "--plan", "auto"]
    options = arguments().parse_args(words)
    adapter = adapter_config(options)
    assert adapter is not None
    model, found = loaded(folder, load_in)
    model = jax.block_until_ready(jaxtune.get_peft_model(model, **adapter.settings))
    found["adapted"] = lost(model)
    print(json.dumps(found), flush=True)
    if train:
        trainer = make_trainer(options, model)
        del model  # what the run copies is freed
        print(json.dumps(found | {"begun": trained(trainer, options)}))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--saved", help="the format that the folder has the weights in")
    parser.add_argument("--formats", default="nf4,fp8")
    parser.add_argument("--card", type=float, default=12.0, help="GiB")
    parser.add_argument("--train", action="store_true", help="train too")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all")
    parser.add_argument("--work", type=Path, help="keeps the model's folder for the next call")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    from benchmarks.record import commit_here, driver_bytes, write
    from jaxtune.train.planning.devices import CONTEXT_BYTES

    end, work = time.monotonic() + options.seconds, options.work or Path(tempfile.mkdtemp())
    folder, total = work / "model", driver_bytes()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    record = {"benchmark": "train/load_gaps", "commit": commit_here(), "shape": options.shape, "formats": {}}
    record |= {"card_gib": options.card, "saved": options.saved}
    if options.output.is_file():
        record = json.loads(options.output.read_text(encoding="utf-8"))
    if not folder.is_dir():
        script = (
            "import sys, jax, jaxtune; from benchmarks.random_model import random_model;"
            "from benchmarks.shapes import SHAPES;"
            "model = random_model(SHAPES[sys.argv[1]], jax.random.key(0), sys.argv[3] or None);"
            "jaxtune.save_pretrained(model, sys.argv[2])"
        )
        command = [sys.executable, "-c", script, options.shape, str(folder), options.saved or ""]
        subprocess.run(command, env=environment, check=True)
    if total:
        share = (options.card * 2**30 - CONTEXT_BYTES) / total
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.5f}"
    for load_in in options.formats.split(","):
        command = [
            sys.executable,
            __file__,
            "--child",
            str(folder),
            load_in,
            options.shape,
            options.saved or load_in,
            "train" * options.train,
        ]
        left = max(end - time.monotonic(), 1.0)
        try:
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=left)
        except subprocess.SubprocessError as error:
            print(f"{load_in}: {error}; {getattr(error, 'stderr', '')}", flush=True)
            continue
        found = record["formats"][load_in] = json.loads(done.stdout.strip().splitlines()[-1])
        write(options.output, record)
        print(load_in, {name: value for name, value in found.items() if name != "stats"}, flush=True)
    if options.work is None:
        shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
