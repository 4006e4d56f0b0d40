"""Training speed of rows with pictures beside rows of text, by the command, of a published shape with random weights.

    python -m benchmarks.pictures --output FILE.json [--shape qwen3.5-9b] [--counts 0,1,4] [--side 512] [--tower]
        [--card-gib 12] [--layers N] [--seconds 540] [--work FOLDER] [KEY=VALUE ...]

--counts: pictures in each row of 2,048 tokens, a run of `jaxtune train` each, of 12 steps of 8 rows; KEY=VALUE are
further keys of its recipe. --card-gib: the allocator gives out what such a card would, and plans are for it. --tower:
also the milliseconds of a frozen tower's pass over 8,192 and 32,768 patches in pictures of 1,024. The model's folder is
in --work, where the next call has it, too. FILE.json is written after each run; FILE.log has what they print.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.commanded import train
from benchmarks.record import commit_here, write

_STEPS, _ROWS, _LENGTH = 12, 8, 2048
_WARM = 3  # steps that are not counted
_STILL = {"patch_size": 16, "image_processor_type": "Qwen2VLImageProcessorFast", "temporal_patch_size": 2}
_UNIFIED = {"patch_size": 16, "image_processor_type": "Gemma4UnifiedImageProcessor", "pooling_kernel_size": 3}
# By shape: config.json around the text, the file of the processor, and its tokens (before, of and after a picture).
VISION: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str, str]]] = {
    "qwen3.5-9b": (
        {
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "vision_config": {
                "model_type": "qwen3_5",
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_heads": 16,
                "hidden_act": "gelu_pytorch_tanh",
                "in_channels": 3,
                "initializer_range": 0.02,
                "num_position_embeddings": 2304,
                "out_hidden_size": 4096,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "deepstack_visual_indexes": [],
            },
        },
        _STILL
        | {"merge_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
        | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        ("vision_start", "image", "vision_end"),
    ),
    "gemma-4-12b": (
        {
            "model_type": "gemma4_unified",
            "architectures": ["Gemma4UnifiedForConditionalGeneration"],
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "mm_embed_dim": 3840,
                "mm_posemb_size": 1120,
                "model_patch_size": 48,
                "num_soft_tokens": 280,
                "output_proj_dims": 3840,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "rms_norm_eps": 1e-6,
                "initializer_range": 0.02,
            },
        },
        _UNIFIED | {"max_soft_tokens": 280, "do_normalize": False, "image_mean": [0.0] * 3, "image_std": [1.0] * 3},
        ("boi", "image", "eoi"),
    ),
}


# ---- a folder, rows, and a tower's milliseconds, each in a process of its own


def write_model(shape: str, layers: int | None, folder: Path) -> None:
    import jax

    from benchmarks.peers.checkpoint import write_tokenizer
    from benchmarks.random_model import random_model
    from benchmarks.shapes import SHAPES
    from jaxtune.models.hf import save_pretrained

    around, settings, names = VISION[shape]
    marks = [f"<|{name}|>" for name in names]
    shown = "".join(marks) if shape.startswith("qwen") else marks[1]
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}" + shown + "{% else %}{{ part.text }}"
        "{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    )
    with tempfile.TemporaryDirectory() as place:
        tokenizer = write_tokenizer(Path(place), template, marks)
    text = dict(SHAPES[shape])
    if layers is not None:
        text |= {"num_hidden_layers": layers}
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:layers]
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in zip(names, marks, strict=True)}
    outer = {
        **around,
        **ids,
        "text_config": text,
        **{name: text[name] for name in ("tie_word_embeddings",) if name in text},
    }
    config = folder.with_name(f"{folder.name}_config")
    config.mkdir(parents=True, exist_ok=True)
    (config / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    (config / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_pretrained(random_model(outer, jax.random.key(0), folder=config), folder, tokenizer)


def write_rows(folder: Path, pictures: int, side: int) -> Path:
    """Rows that are cut to the length, each with its own pictures."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(pictures)
    lines = []
    for row in range(_ROWS * 4):
        parts: list[dict[str, str]] = []
        for number in range(pictures):
            name = f"{row}_{number}.jpg"
            coarse = draw.integers(0, 256, (side // 16, side // 16, 3), np.uint8)
            Image.fromarray(coarse).resize((side, side)).save(folder / name)
            parts.append({"type": "image", "image": name})
        answer = "".join(chr(97 + number) for number in draw.integers(0, 26, _LENGTH).tolist())
        asked = [*parts, {"type": "text", "text": f"Row {row}?"}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(lines), encoding="utf-8")
    return rows


def tower_ms(shape: str) -> dict[str, float]:
    """{patches: milliseconds of a pass of the frozen tower, bf16}."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from benchmarks.shapes import SHAPES
    from jaxtune.models.registry import tower_config
    from jaxtune.models.vision.pictures import Pictures

    config = tower_config(VISION[shape][0] | {"image_token_id": 0, "text_config": dict(SHAPES[shape])})
    tower = config.make(jax.random.key(0), "bfloat16")
    graph, state = nnx.split(tower)
    times = {}
    for patches in (8192, 32768):
        each, rows = 1024, 8
        row = patches // rows
        index = np.arange(row)
        inside = index % each
        block, within = np.divmod(inside, 4)
        coordinates = np.stack([block // 16 * 2 + within // 2, block % 16 * 2 + within % 2], -1).astype(np.int32)
        pictures = Pictures(
            patches=jnp.zeros((rows, row, config.patch_numbers), jnp.bfloat16),
            patch_segments=jnp.asarray(np.tile(index // each + 1, (rows, 1)).astype(np.int32)),
            patch_grids=jnp.full((rows, row, 2), 32, jnp.int32),
            patch_coordinates=jnp.asarray(np.tile(coordinates, (rows, 1, 1))),
            picture_features=jnp.zeros((rows, 1), jnp.int32),
            max_pictures=row // each,
        )
        run = jax.jit(lambda state, pictures: nnx.merge(graph, state)(pictures)[0])
        jax.block_until_ready(run(state, pictures))
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(4):
                last = run(state, pictures)
            jax.block_until_ready(last)
            seconds.append((time.perf_counter() - began) / 4)
        times[str(patches)] = 1e3 * min(seconds)
    return times


# ---- all of them


def _patch(shape: str) -> int:
    """Pixels of a patch's side."""
    vision = VISION[shape][0]["vision_config"]
    return vision.get("model_patch_size", vision["patch_size"])


def trained(options: argparse.Namespace, model: Path, count: int, log: Path) -> dict[str, Any]:
    """Figures of a run."""
    rows = options.work / f"rows_{options.side}_{count}"
    if not (rows / "rows.jsonl").exists():
        write_rows(rows, count, options.side)
    output, patches = options.work / f"run_{count}", count * (options.side // _patch(options.shape)) ** 2
    recipe: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": str(rows / "rows.jsonl"), "length": _LENGTH, "patches_per_row": patches or None},
        "adapter": {"r": 16, "lora_alpha": 16},
        "rows_per_step": _ROWS,
        "steps": _STEPS,
        "checkpoint": {"every_steps": None, "every_minutes": None},
        "export": {"merged": False},
        "output": str(output),
    }
    done = train(recipe, options.changes, options.work / "recipe.yaml", log, options.card_gib)
    if "failed" in done:
        return {"failed": done["failed"]}
    metrics = done["metrics"]
    steps = [line for line in metrics if "step_seconds" in line and line["step"] > _WARM]
    seconds = statistics.median(line["step_seconds"] for line in steps)
    text = " ".join(done["said"].split())
    said = re.findall(r"([\d,]+) pictures of ([\d, to]+) tokens and ([\d, to]+) patches", text)
    return {
        "pictures_a_row": count,
        "pictures": said[-1] if count and said else None,
        "patches_a_row": patches,
        "step_seconds": seconds,
        "tokens_per_second": _ROWS * _LENGTH / seconds,
        "pictures_per_second": _ROWS * count / seconds,
        "real_tokens_per_second": statistics.median(line["real_tokens_per_second"] for line in steps),
        "peak_memory_gb": max(line.get("peak_memory_bytes", 0) for line in metrics) / 1e9,
        "losses": [line["loss"] for line in metrics if "loss" in line],
        "whole_seconds": done["whole_seconds"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--shape", choices=list(VISION), default="qwen3.5-9b")
    parser.add_argument("--counts", default="0,1,4")
    parser.add_argument("--side", type=int, default=512, help="pixels of a picture's side")
    parser.add_argument("--card-gib", type=float)
    parser.add_argument("--layers", type=int, help="of the text, in place of the shape's")
    parser.add_argument("--tower", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="after which no run begins")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "pictures")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "tower":
        print(json.dumps(tower_ms(options.shape)))
        return 0
    model = options.work / f"{options.shape}_{options.layers or 'all'}"
    if options.part == "model":
        write_model(options.shape, options.layers, model)
        return 0
    ends = time.monotonic() + options.seconds
    options.output.parent.mkdir(parents=True, exist_ok=True)
    log = options.output.with_suffix(".log")
    facts = {name: getattr(options, name) for name in ("shape", "layers", "side", "card_gib", "changes")}
    record: dict[str, Any] = {"benchmark": "pictures", "commit": commit_here(), **facts, "runs": []}
    again = [sys.executable, "-m", "benchmarks.pictures", *sys.argv[1:], "--part"]
    if not model.exists():
        began = time.monotonic()
        subprocess.run([*again, "model"], check=True)
        print(f"model's folder in {time.monotonic() - began:.0f} s", flush=True)
    for count in map(int, options.counts.split(",")):
        if time.monotonic() > ends:
            break
        record["runs"].append(run := trained(options, model, count, log))
        write(options.output, record)
        print(json.dumps({key: value for key, value in run.items() if key != "losses"}), flush=True)
    if options.tower and time.monotonic() < ends:
        done = subprocess.run([*again, "tower"], stdout=subprocess.PIPE, text=True, check=False)
        record["tower_ms"] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else "failed"
        write(options.output, record)
        print("tower", record["tower_ms"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
