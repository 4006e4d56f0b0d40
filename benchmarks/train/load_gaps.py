"""What the allocator of a card loses when a model with quantised weights is loaded: what the weights and the largest
free block leave of its memory. A step's temporary memory is one block, and cannot have the rest. The planner counts it
by `Format.slack`.

    python benchmarks/train/load_gaps.py [--shape llama-3.1-8b] [--saved nf4] [--formats nf4,fp8] [--card 12]
        [--seconds 240] --output FILE.json

A folder of the shape with random weights, in 16 bits or in the format --saved, is written once, and loaded by a process
for each format (a value of model.load_in; "stored": as the folder has it), whose allocator gives out no more than a
card of --card GiB would. `lost_bytes` are in gaps between blocks in use (`in_gaps_bytes`) or in blocks that are larger
than the arrays in them (`in_blocks_bytes`; other arrays than weights, if any, count there too). `lost_share`, of the
quantised weights' bytes, is what to compare with `slack`. `adapted` has the same bytes once the model has an adapter of
rank 16 on all linears.
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


def lost(model) -> dict[str, float]:
    """Bytes that the allocator has lost, while nothing but the model is on the device."""
    import jax

    from jaxtune.train.planning.sizes import nbytes

    stats = jax.local_devices()[0].memory_stats()
    return {
        "weight_bytes": nbytes(model),
        "in_gaps_bytes": stats["bytes_limit"] - stats["bytes_in_use"] - stats["largest_free_block_bytes"],
        "in_blocks_bytes": stats["bytes_in_use"] - nbytes(model),
    }


def child(folder: str, load_in: str) -> None:
    """Loads the folder, and prints what the allocator then has."""
    import jax

    import jaxtune
    from jaxtune.pallas.formats import Stored
    from jaxtune.train.planning.sizes import nbytes

    begun = time.monotonic()
    model, _ = jaxtune.from_pretrained(folder, load_in=load_in)
    seconds = time.monotonic() - begun
    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, Stored))
    quantised = sum(nbytes(leaf) for leaf in leaves if isinstance(leaf, Stored))
    stats = jax.local_devices()[0].memory_stats()
    found = lost(model) | {"quantised_bytes": quantised, "load_seconds": seconds}
    found["lost_bytes"] = found["in_gaps_bytes"] + found["in_blocks_bytes"]
    found["lost_share"] = found["lost_bytes"] / quantised
    adapted = jax.block_until_ready(jaxtune.get_peft_model(model, r=16))
    print(json.dumps(found | {"adapted": lost(adapted), "stats": stats}))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--saved", help="the format that the folder has the weights in")
    parser.add_argument("--formats", default="nf4,fp8")
    parser.add_argument("--card", type=float, default=12.0, help="GiB")
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
        command = [sys.executable, __file__, "--child", str(folder), load_in]
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
