"""Memory and time of loading a 16-bit folder in NF4: what stays, and the peak on the way, on the device and the host.

    python benchmarks/train/qlora_load.py [--shape llama-3.1-8b] [--output FILE.json]

A folder of the shape is written first, its tensors cut from one block of random bfloat16 numbers. It is loaded in a
process of its own, as from_pretrained(folder, load_in="nf4") does it for anybody. (The step of a model too large to be
measured with one is that of `benchmarks/train/step.py --shape qwen3-32b --load-in nf4 --rows 4 --micro-batches 4
--plan recompute --steps 5`.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

RESULT = "RESULT "
MAX_DEVICE_GB, MAX_RATIO = 6.5, 1.1  # of the 8B shape; of any


def write_folder(folder: Path, shape: Mapping[str, Any], shard_bytes: int = 5_000_000_000) -> int:
    """A Hugging Face folder of the shape in bfloat16; returns the bytes of its weights. On the host alone."""
    import jax
    import ml_dtypes
    import numpy as np
    from flax import nnx

    from jaxtune.models import shards
    from jaxtune.models.decoder import Decoder
    from jaxtune.models.families.common import tensor_name
    from jaxtune.models.registry import config_from_hf, family

    config = config_from_hf(dict(shape))
    model = nnx.eval_shape(lambda: Decoder(config, jax.random.key(0), "bfloat16"))
    norms = family(config.family).NORMS
    sizes = {tensor_name(path, norms): v.get_value().shape for path, v in nnx.to_flat_state(nnx.state(model))}
    dtype = np.dtype(ml_dtypes.bfloat16)
    largest = max(int(np.prod(size)) for size in sizes.values())
    block = np.resize((np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(dtype), largest)
    folder.mkdir(parents=True)
    files = shards.plan_shards([(n, int(np.prod(s)) * dtype.itemsize) for n, s in sizes.items()], shard_bytes)
    weight_map = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = [(name, sizes[name], dtype) for name in names]
        shards.write_file(folder / file, tensors, lambda name: block[: int(np.prod(sizes[name]))].reshape(sizes[name]))
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(dict(shape)), encoding="utf-8")
    return sum(int(np.prod(size)) for size in sizes.values()) * dtype.itemsize


def load(folder: Path) -> dict[str, Any]:
    """Loads the folder in NF4 in this process; bytes that stay and peaks, those of the device where it tells them."""
    import resource

    import jax
    from flax import nnx

    from jaxtune.models.hf import from_pretrained

    device = jax.devices()[0]
    jax.block_until_ready(jax.numpy.zeros(8))  # the device's own start is no part of loading
    host_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    model, _ = from_pretrained(folder, load_in="nf4")
    leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    seconds = time.perf_counter() - started
    stats = device.memory_stats() or {}
    stays, peak = stats.get("bytes_in_use"), stats.get("peak_bytes_in_use")
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - host_before
    return {
        "load_seconds": seconds,
        "weights_gb": sum(leaf.nbytes for leaf in leaves) / 1e9,
        "device_gb": None if stays is None else stays / 1e9,
        "device_peak_gb": None if peak is None else peak / 1e9,
        "device_peak_ratio": None if stays is None else peak / stays,
        "host_peak_growth_gb": host_peak / 1e9,
    }


def child(*arguments: str, **environment: str) -> Any:
    """What this file prints as its result, run with these arguments in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not found:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(found[0].removeprefix(RESULT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--output")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from benchmarks.shapes import SHAPES

    if options.write:
        print(RESULT + json.dumps(write_folder(Path(options.write), SHAPES[options.shape])))
        return 0
    if options.load:
        print(RESULT + json.dumps(load(Path(options.load))))
        return 0
    with tempfile.TemporaryDirectory() as work:
        folder, started = str(Path(work) / "model"), time.perf_counter()
        weight_bytes = child("--write", folder, "--shape", options.shape, JAX_PLATFORMS="cpu")
        write_seconds = time.perf_counter() - started
        # Allocated as it is asked for, so that what the device says is what loading took.
        loaded = child("--load", folder, XLA_PYTHON_CLIENT_PREALLOCATE="false")

    from benchmarks.record import environment, write

    record = {
        "benchmark": "train/qlora_load",
        **environment(),
        "shape": options.shape,
        "folder_gb": weight_bytes / 1e9,
        "write_seconds": write_seconds,
        **loaded,
    }
    if options.output:
        write(options.output, record)
    print(json.dumps(record))
    if record["device_gb"] is None:
        return 0  # a CPU does not say
    fits = options.shape != "llama-3.1-8b" or record["device_gb"] <= MAX_DEVICE_GB
    return 0 if fits and record["device_peak_ratio"] <= MAX_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
