"""Loading, merging and exporting a model, held against a plain copy of the same files.

    python benchmarks/train/files.py [--shape llama-3.1-8b] --output FILE.json [--seconds 200] [--work FOLDER]
        [--tokenizer FOLDER] [--only bf16]

Random weights of the shape are saved as a Hugging Face folder, or the one that an earlier call left in --work is taken.
Then, one after another, alone on the machine:

    copy     shutil.copytree of the folder, "cold" (the kernel was asked to drop the files from its page cache, which
             some file systems do not do: the disk's bytes are recorded) and "warm"; the same of each file below
    bf16     a process: load cold, load warm, merge (an adapter of rank 16 that it saved over the model), GGUF in q8_0
    nf4      a process: load cold and warm, quantising to NF4, and GGUF in q4_k_m
    links    reading the files by 8 threads into new and into the same memory, writing new files in several ways,
             touching new memory, and 1 GiB to the device and back, by one thread and by several, and by way of pinned
             memory

"Cold" also is the first of its process: it compiles, and imports what it needs. A load's `times_copy` is its seconds
divided by those of the copy of what it reads, cold or warm alike; that of a merge or an export by those of the warm
copy of what it writes. Beside it stands `times_copies_of_both`, of which the divisor is the mean of two warm copies, of
the model that is converted and of what is written. `times_flushed_copy` and `times_flushed_copies_of_both` are the same
with copies that end when the disk has them, as a merge and an export do. 1 / 0.7 = 1.43 is the aim. Of each part the
record has the seconds of its parts, which programs were compiled (how often, and for how long), how many cores were
busy, and where each kind of thread was found 50 times a second (benchmarks/waits.py). It is written after each part;
once --seconds are over, no further part begins, and a process in work ends.

Args: --tokenizer is a folder with a real tokenizer; without it, one as large as Llama 3's is made.
--only runs one of the two processes.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.processes import ROOT
from benchmarks.record import environment, write
from benchmarks.waits import Part

_CHUNK_BYTES = 16 << 20
_THREADS = 8
PROCESSES = {"bf16": (None, "q8_0"), "nf4": ("nf4", "q4_k_m")}


class Record:
    """The record of a call, which is written again whenever a part is added; processes hand the file on."""

    def __init__(self, output: Path):
        self.output = output

    def add(self, name: str, entry: Any) -> None:
        whole = json.loads(self.output.read_text(encoding="utf-8"))
        whole["parts"][name] = entry
        write(self.output, whole)
        shown = {key: value for key, value in entry.items() if key != "threads"}
        print(name, json.dumps(shown), flush=True)

    def seconds(self, name: str, kind: str = "seconds") -> float:
        return json.loads(self.output.read_text(encoding="utf-8"))["parts"][name][kind]


# ---- plain copies and links


def flush(folder: Path, drop: bool = False) -> None:
    """Waits until the disk has a folder's files, and with `drop` asks the kernel to drop them from its page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            if drop:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def copied(folder: Path) -> dict[str, Any]:
    """A plain copy of a folder, which is removed again. `flushed_seconds` is how long it took until the disk had the
    copy, which a plain copy does not wait for, and what jaxtune writes does."""
    target = folder.with_name(folder.name + "-copy")
    begun = time.perf_counter()
    with Part() as part:
        shutil.copytree(folder, target)
    flush(target)
    part.record["flushed_seconds"] = round(time.perf_counter() - begun, 2)
    size = size_of(target)
    shutil.rmtree(target)
    part.record.pop("threads")
    return part.record | {"bytes": size, "gb_per_second": round(size / 1e9 / max(part.record["seconds"], 0.01), 2)}


def read_by_threads(folder: Path, new_memory: bool) -> float:
    """GB/s of reading all weights by threads, each chunk into new memory or each thread into its own."""
    import threading

    import numpy as np

    own = threading.local()
    places = [
        (file, at)
        for file in sorted(folder.glob("*.safetensors"))
        for at in range(0, file.stat().st_size, _CHUNK_BYTES)
    ]

    def one(place: tuple[Path, int]) -> int:
        file, at = place
        if new_memory or not hasattr(own, "data"):
            own.data = np.empty(_CHUNK_BYTES, np.uint8)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return os.preadv(descriptor, [memoryview(own.data)], at)
        finally:
            os.close(descriptor)

    begun = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        size = sum(pool.map(one, places))
    return round(size / 1e9 / (time.perf_counter() - begun), 2)


def written_by_threads(folder: Path) -> dict[str, float]:
    """GB/s of writing 4 GB to new files as exports do, in chunks: by one thread and by eight into one file, and by
    eight into eight files; the same into room that was reserved before; and how fast the disk then has the bytes."""
    data = memoryview(bytes(bytearray(os.urandom(1 << 20)) * (_CHUNK_BYTES >> 20)))
    chunks = (4 << 30) // _CHUNK_BYTES
    found = {}

    def rate(seconds: float) -> float:
        return round(chunks * _CHUNK_BYTES / 1e9 / seconds, 2)

    for name, threads, files, reserved in (
        ("1 thread", 1, 1, False),
        ("8 threads", 8, 1, False),
        ("8 threads, 8 files", 8, 8, False),
        ("8 threads, reserved", 8, 1, True),
    ):
        target = Path(tempfile.mkdtemp(dir=folder))
        opened = [os.open(target / str(index), os.O_WRONLY | os.O_CREAT) for index in range(files)]
        begun = time.perf_counter()
        for descriptor in opened if reserved else ():
            os.posix_fallocate(descriptor, 0, chunks * _CHUNK_BYTES // files)

        places = [(opened[index % files], index // files * _CHUNK_BYTES) for index in range(chunks)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda place: os.pwrite(place[0], data, place[1]), places))
        found[name] = rate(time.perf_counter() - begun)
        begun = time.perf_counter()
        for descriptor in opened:
            os.fdatasync(descriptor)
            os.close(descriptor)
        found[f"{name}: flushed"] = rate(time.perf_counter() - begun)
        shutil.rmtree(target)
    return found


def memory_links() -> dict[str, float]:
    """GB/s of 1 GiB: touching new memory, from numpy arrays to the device and back, to pinned memory, and from there
    to numpy arrays; as one array and as several by as many threads. It is the second time."""
    import jax
    import numpy as np

    def rate(function: Callable[[Any], Any], items: list, threads: int) -> float:
        for _ in range(2):
            begun = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(function, items))
            seconds = time.perf_counter() - begun
        return round((1 << 30) / 1e9 / seconds, 2)

    def new(size: int) -> None:
        np.empty(size, np.uint8).fill(1)

    def put(array: Any) -> Any:
        return jax.block_until_ready(jax.device_put(array))

    def fetched(array: Any) -> Any:  # without the copy that JAX keeps with an array
        return np.array(jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array]), copy=False)

    def pinned(array: Any) -> Any:
        return jax.block_until_ready(jax.device_put(array, array.sharding.with_memory_kind("pinned_host")))

    found = {}
    for count in (1, 3, _THREADS):
        size = (1 << 30) // count
        host = [np.ones(size, np.uint8) for _ in range(count)]
        found[f"new_memory_{count}"] = rate(new, [size] * count, count)
        found[f"to_device_{count}"] = rate(put, host, count)
        device = [put(array) for array in host]
        found[f"to_host_{count}"] = rate(fetched, device, count)
        if jax.default_backend() == "gpu":
            found[f"to_pinned_{count}"] = rate(pinned, device, count)
            found[f"from_pinned_{count}"] = rate(fetched, [pinned(array) for array in device], count)
    return found


# ---- the processes


def timed(part: Part) -> None:
    """Has functions that a part calls add their seconds to it; those that several threads call at once add up."""
    from jaxtune.export import gguf_blocks, gguf_file
    from jaxtune.models import hf
    from jaxtune.models.adapters import merge
    from jaxtune.models.files import folders

    def wrap(module: Any, function: str, name: str) -> None:
        inner = getattr(module, function)
        inner = getattr(inner, "untimed", inner)

        def outer(*given: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return inner(*given, **named)
            finally:
                part.seconds[name] += time.perf_counter() - begun

        outer.untimed = inner
        setattr(module, function, outer)

    wrap(hf, "load_tokenizer", "tokenizer")
    wrap(hf, "read_tensors", "read_tensors")
    wrap(hf, "Pretrained", "headers")
    wrap(hf, "write_checkpoint", "write")
    wrap(gguf_file, "write", "write")
    wrap(gguf_file, "verify", "read_back")
    wrap(gguf_blocks, "_fetched", "fetched, of threads")
    wrap(merge, "check_logits", "check_logits")
    wrap(folders, "sync", "sync")


def compile_seconds(part_now: list[Part]) -> None:
    """Has JAX's compiler add its seconds to the part that runs, and record which programs it compiled for it."""
    import jax

    def heard(event: str, duration_secs: float, **said: str | int) -> None:
        for word in ("backend_compile", "jaxpr_trace", "to_mlir", "cache_retrieval"):
            if word in event:
                part_now[0].seconds[f"jax: {word}"] += duration_secs
        if "backend_compile" in event:
            programs = part_now[0].record.setdefault("programs", {})
            count, seconds = programs.get(said.get("fun_name"), (0, 0.0))
            programs[said.get("fun_name")] = (count + 1, round(seconds + duration_secs, 3))

    jax.monitoring.register_event_duration_secs_listener(heard)


def child(name: str, work: Path, record: Record, end: float) -> None:
    """Loads, merges and exports in this process."""
    begun = time.perf_counter()
    import jax

    from jaxtune.export.api import export_model
    from jaxtune.models.adapters.adapter_files import save_adapter
    from jaxtune.models.adapters.merge import merged_weights
    from jaxtune.models.hf import from_pretrained, save_weights

    imports = time.perf_counter() - begun
    jax.block_until_ready(jax.numpy.zeros(8))
    write(record.output, json.loads(record.output.read_text(encoding="utf-8")) | environment())
    record.add(f"{name}: process", {"imports": imports, "device": time.perf_counter() - begun - imports})
    load_in, outtype = PROCESSES[name]
    current = [Part()]
    compile_seconds(current)

    def part(title: str, function: Callable[[], Any], against: str = "", written: Path | None = None) -> Any:
        current[0] = Part()
        timed(current[0])
        with current[0]:
            result = function()
        entry, seconds = {}, current[0].record["seconds"]
        if written is not None:
            record.add(f"copy of {name}: {title}", copied(written))
            against = f"copy of {name}: {title}"
            for prefix, kind in (("", "seconds"), ("flushed_", "flushed_seconds")):
                both = record.seconds("copy warm", kind) + record.seconds(against, kind)
                entry[f"times_{prefix}copies_of_both"] = round(seconds / (both / 2), 2)
            entry["times_flushed_copy"] = round(seconds / record.seconds(against, "flushed_seconds"), 2)
        peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())
        entry |= {"times_copy": round(seconds / record.seconds(against), 2), "peak_device_bytes": peak}
        record.add(f"{name}: {title}", entry | current[0].record)
        if time.time() > end:
            sys.exit(3)
        return result

    folder, merged, gguf = work / "model", work / "merged", work / "gguf"
    flush(folder, drop=True)
    model, tokenizer = part("load cold", lambda: from_pretrained(folder, load_in=load_in), "copy cold")
    if name == "bf16":
        adapted = with_adapter(model)
        save_adapter(adapted, work / "adapter")
        part("merge", lambda: save_weights(merged_weights(adapted), merged, tokenizer), written=merged)
        shutil.rmtree(merged)
        del adapted
    del model, tokenizer
    model, tokenizer = part("load warm", lambda: from_pretrained(folder, load_in=load_in), "copy warm")
    part(
        f"gguf {outtype}", lambda: export_model(model, gguf, "gguf", tokenizer=tokenizer, outtype=outtype), written=gguf
    )
    shutil.rmtree(gguf)


def with_adapter(model: Any) -> Any:
    """The model with an adapter whose B is not zero."""
    import jax

    from jaxtune.models.lora import get_peft_model, linears

    adapted = get_peft_model(model, r=16)
    for index, (_, linear) in enumerate(linears(adapted)):
        if linear.lora is not None:
            b = linear.lora.b
            b.set_value(0.01 * jax.random.normal(jax.random.key(index), b.shape, b.get_value().dtype))
    return adapted


def make(shape: str, folder: Path, tokenizer: Path | None) -> None:
    """Writes the folder, in this process."""
    import jax

    import jaxtune
    from benchmarks.random_model import random_model
    from benchmarks.shapes import SHAPES

    jaxtune.save_pretrained(random_model(SHAPES[shape], jax.random.key(0)), folder)
    if tokenizer is None:
        large_tokenizer(SHAPES[shape]["vocab_size"]).save_pretrained(folder)
    else:
        for file in tokenizer.iterdir():
            shutil.copyfile(file, folder / file.name)


def large_tokenizer(size: int) -> Any:
    """A tokenizer over bytes that cuts text as Llama 3's does, with as many tokens as that, or as `size`."""
    import itertools

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(itertools.product(letters, letters))
    merges = pairs + list(itertools.product(["".join(pair) for pair in pairs[:256]], letters))
    merges = merges[: min(size, 128_256) - len(letters) - 2]
    vocab = {text: index for index, text in enumerate([*letters, *map("".join, merges)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    pattern = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--only", choices=PROCESSES)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    end = options.end or time.time() + options.seconds
    work = (options.work or Path(tempfile.mkdtemp())).resolve()
    record = Record(options.output.resolve())
    if options.child == "make":
        make(options.shape, work / "model", options.tokenizer)
        return 0
    if options.child == "links":
        record.add("links of the memory, GB/s", memory_links())
        return 0
    if options.child:
        modules: dict[str, Any] = sys.modules
        modules.setdefault("torch", None)  # as the command does, see cli.console
        child(options.child, work, record, end)
        return 0
    work.mkdir(parents=True, exist_ok=True)

    def process(name: str) -> None:
        """A process of its own, so that none finds what another has imported or compiled."""
        words = ["--output", str(record.output), "--work", str(work), "--shape", options.shape, "--end", str(end)]
        words += ["--tokenizer", str(options.tokenizer.resolve())] if options.tokenizer else []
        variables = os.environ | {"PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")}
        variables.pop("JAX_COMPILATION_CACHE_DIR", None)
        try:
            command = [sys.executable, __file__, "--child", name, *words]
            found = subprocess.run(command, env=variables, check=False, timeout=max(end - time.time(), 1))
            if found.returncode not in (0, 3):
                print(f"{name}: ended with {found.returncode}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{name}: its time ran out", flush=True)

    begun = time.time()
    write(record.output, {"benchmark": "train/files", "shape": options.shape, "parts": {}})
    if not (work / "model").is_dir():
        process("make")
    folder = work / "model"
    record.add("model", {"bytes": size_of(folder), "seconds": round(time.time() - begun, 1)})
    flush(folder, drop=True)
    record.add("copy cold", copied(folder))
    record.add("copy warm", copied(folder))
    for name in [options.only] if options.only else PROCESSES:
        if time.time() < end:
            process(name)
    if time.time() < end:
        links = {"new_memory": read_by_threads(folder, True), "same_memory": read_by_threads(folder, False)}
        record.add("links of the files, warm, GB/s", links | written_by_threads(work))
        process("links")
    return 0


if __name__ == "__main__":
    sys.exit(main())
