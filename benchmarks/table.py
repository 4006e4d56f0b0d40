"""Writes docs/measured.md, the README's picture and its few figures from the JSON under benchmarks/results/.

    python benchmarks/table.py            # rewrites them, the texts between their markers
    python benchmarks/table.py --check    # fails if one differs

A training record whose first loss is not near ln V, or in which a trained matrix had no gradient by step 2, proves
nothing and is an error here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.chart import caption, sides, svg  # noqa: E402
from benchmarks.record import RESULTS, honest  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402

README, MEASURED, PICTURE = ROOT / "README.md", ROOT / "docs/measured.md", ROOT / "docs/images/speed_and_memory.svg"
KERNELS = ("kernels/attention", "kernels/quant_matmul", "moe")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"  # of what is written here


class Rejected(ValueError):
    """A record that must not stand in a table."""


def load(folder: Path = RESULTS) -> list[dict]:
    """The records of a folder, by file name.

    Raises:
      Rejected: a training record that proves nothing.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        proofs = {"train/step": [record], "train/attention_pair": record.get("arms", {}).values()}
        for proof in proofs.get(record.get("benchmark"), ()):
            problem = honest(proof)
            if problem is not None:
                raise Rejected(f"{path.name}: {problem}")
        records.append(record)
    return records


def _versions(record: dict) -> str:
    cudnn = next((v for k, v in record["versions"].items() if k.startswith("nvidia-cudnn")), "none")
    return f"{record['device']}, jax {record['versions']['jax']}, cuDNN {cudnn}, commit {record['commit'][:7]}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _residuals(record: dict) -> str:
    parts = record.get("micro_batches", 1)
    budget = record.get("budget_gb")
    chosen = "keep" if record["residuals"] == "keep" else "recompute" if record["residuals"] == "recompute" else "mixed"
    what = f"planned for {budget:g} GB: {chosen}" if budget else chosen
    return what if parts == 1 else f"{what}, {parts} micro-batches"


def step_table(records: list[dict]) -> list[str]:
    lines = [
        "| model | rows x length | documents | attention | residuals | tokens/s | MFU | peak GB "
        "| compile s, cold / cached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        what = f"LoRA r={r['adapter_rank']}" if r["adapter_rank"] else "full"
        if SHAPES[r["shape"]].get("num_local_experts") or SHAPES[r["shape"]].get("num_experts"):
            what += " on attention and experts"
        if r.get("optimizer", "adamw") != "adamw":
            what += f", {r['optimizer']}"
        documents = "one a row" if r["documents"] == "full" else f"packed, up to {r['max_documents']} a row"
        mfu = "-" if r["mfu"] is None else f"{100 * r['mfu']:.1f} %"
        lines.append(
            f"| {r['shape']} {r.get('load_in') or 'bf16'} {what} | {r['rows']} x {r['length']:,} | {documents} "
            f"| {r['attention']} | {_residuals(r)} "
            f"| **{r['tokens_per_second']:,.0f}** | {mfu} | {r['peak_memory_gb']:.1f} "
            f"| {_seconds(r['compile_seconds_cold'])} / {_seconds(r['compile_seconds_cached'])} |"
        )
    commits = sorted({r["commit"][:7] for r in records})
    where = _versions(records[0]).rsplit(", commit", 1)[0]
    return [*lines, "", f"{where}, commits {', '.join(commits)}. `python benchmarks/train/step.py --help` says how."]


def parts_table(record: dict) -> list[str]:
    """Where a profiled step's time goes."""
    parts = record["parts"]
    total = sum(ms for _, ms in parts["categories"])
    what = f"{record['shape']} {record.get('load_in') or 'bf16'} LoRA r={record['adapter_rank']}"
    lines = [f"| a step of {what}, {record['rows']} x {record['length']:,} | ms | share |", "|---|---|---|"]
    lines += [f"| {name} | {ms:.1f} | {100 * ms / total:.1f} % |" for name, ms in parts["categories"] if ms >= 0.05]
    scopes = ", ".join(f"{name} {phase} {ms:.0f}" for name, phase, ms in parts["scopes"])
    note = f"By place, ms: {scopes}. {_versions(record)}. `python benchmarks/train/step.py --load-in nf4 --profile`."
    return [*lines, "", note]


def startup_table(record: dict) -> list[str]:
    lines = [
        "| start, seconds since the process began | weights loaded | data ready | first step done |",
        "|---|---|---|---|",
    ]
    for name in ("cold", "cached"):
        marks = record["runs"][name]
        lines.append(f"| {name} | {marks['loaded']:.1f} | {marks['prepared']:.1f} | **{marks['first_step']:.1f}** |")
    note = (
        f"{record['shape']}, {record['bytes'] / 1e9:.1f} GB of safetensors (a plain read ran at "
        f"{record['plain_read_gb_per_second']:.1f} GB/s); {_versions(record)}. `python benchmarks/train/startup.py`."
    )
    return [*lines, "", note]


def ablation_table(record: dict) -> list[str]:
    """What the field's claims are worth; a row for each claim and model that was measured."""
    lines = [
        "| what the field claims | model | published, step | here, step | forward | range over 5 runs of the step |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["claims"]:
        low, high = row["forward_backward_gain_range"]
        lines.append(
            f"| {row['claim']} | {row['model']} | {row['published'] or '-'} "
            f"| **{100 * row['forward_backward_gain']:+.1f} %** | {100 * row['forward_gain']:+.1f} % "
            f"| {100 * low:+.1f} to {100 * high:+.1f} % |"
        )
    entries = [entry for entry in record["entries"].values() if "error" not in entry]
    commits = ", ".join(sorted({entry["commit"][:7] for entry in entries}))
    where = _versions(entries[0]).rsplit(", commit", 1)[0]
    note = (
        "Time without it over time with it, less one; {layers} layers of each model, packed rows, {rows} x {length:,} "
        "tokens, LoRA r=16. ".format(**record["settings"])
        + f"{where}, commits {commits}. "
        "`python benchmarks/train/ablation.py --help` says what is compared."
    )
    failed = [key for key, entry in record["entries"].items() if "error" in entry]
    return [*lines, "", note + (f" Without a result: {', '.join(failed)}." if failed else "")]


def pair_text(record: dict) -> list[str]:
    ours, theirs = (statistics.median(record[key]) for key in ("ours_step_seconds", "hf_peft_step_seconds"))
    text = (
        "Beside Hugging Face + PEFT in one session ({shape} bf16, LoRA r=16, {rows} x {length:,} tokens, their "
        "gradient checkpointing {hf_peft_gradient_checkpointing}): **{ours:.3f} s** a step against {theirs:.3f} s, "
        "{speedup:.1f} times. {where}. `python benchmarks/train/profile_pair.py`."
    )
    return [text.format(**record, ours=ours, theirs=theirs, where=_versions(record))]


def attention_pair_text(record: dict) -> list[str]:
    """One line: the step with two implementations of attention, and where each one's time goes."""
    names = list(record["arms"])
    texts = []
    for name in names:
        arm = record["arms"][name]
        parts = sorted(arm["profile"]["categories"].items(), key=lambda part: -part[1])
        shares = (f"{part} {100 * ms / arm['profile']['step_ms']:.1f} %" for part, ms in parts)
        texts.append(f"{name} **{arm['step_seconds']:.3f} s** a step ({', '.join(shares)})")
    documents = "whole rows" if record["documents"] == "full" else f"up to {record['max_documents']} documents a row"
    what = f"LoRA r={record['adapter_rank']}" if record["adapter_rank"] else "full"
    shape = f"{record['shape']} {record['load_in'] or 'bf16'} {what}, {record['rows']} x {record['length']:,} tokens"
    text = (
        f"The step with two implementations of attention, taking turns in one process ({shape}, {documents}): "
        f"{texts[0]} against {texts[1]}, **{record['speedup']:.3f}** times as fast. {_versions(record)}. "
        "`python benchmarks/train/attention_pair.py`."
    )
    return [text]


def packing_table(record: dict) -> list[str]:
    """What the step loses where layers build the packing metadata themselves."""
    ways = {
        "per_layer": "as XLA leaves it",
        "per_layer_kept": "kept apart by a barrier",
        "per_layer_host": "by the host",
    }
    lines = [
        "| packing metadata once a batch, against per layer | model | published, step | step | forward | backward |",
        "|---|---|---|---|---|---|",
    ]
    for model in record["models"]:
        for way, words in ways.items():
            arm = model["arms"][way]
            gains = (arm[f"gain_of_once_{part}"] for part in ("forward_backward", "forward", "backward"))
            step, forward, backward = (f"{100 * gain:+.1f} %" for gain in gains)
            published = f"{100 * model['published_gain_of_step']:+.1f} %"
            name = f"{model['model']} {model['frozen_weights']}, {model['layers']} layers"
            lines.append(f"| {words} | {name} | {published} | **{step}** | {forward} | {backward} |")
    note = (
        "Time per layer over time once, less one; every layer waiting for the host is what the published stack did: "
        "here that arm is made for the comparison, and so is the barrier. "
        f"{record['rows']} x {record['length']:,} tokens, LoRA r=16. {_versions(record)}. "
        "`python benchmarks/train/packing_metadata.py`."
    )
    return [*lines, "", note]


def load_text(record: dict) -> list[str]:
    text = (
        "{shape} from a folder of {folder_gb:.1f} GB into NF4: {load_seconds:.1f} s, **{device_gb:.2f} GB** on the "
        "device, {device_peak_gb:.2f} GB at most while loading ({device_peak_ratio:.2f} times), "
        "{host_peak_growth_gb:.1f} GB of host memory. {where}. `python benchmarks/train/qlora_load.py`."
    )
    return [text.format(**record, where=_versions(record))]


def trajectory_text(record: dict) -> list[str]:
    text = (
        "![the same fine-tuning in jaxtune and in transformers + PEFT](images/trajectory.png)\n\n"
        "{steps} steps of LoRA r=16 in bf16 on GSM8K, a model of {shape}'s shape, same base, adapter and batches: "
        "the two losses differ by {mean_difference_last_50:.4f} on average over the last 50 steps, at most "
        "{largest_difference:.4f} at any. {where}. `python benchmarks/train/trajectory.py --help` says how."
    )
    return text.format(**record, where=_versions(record)).split("\n")


_Row = tuple[str, str, float | None, float | None, float | None, bool]


_GATHERED = ("gate_up", "down_dx", "thin")


def moe_rows(record: dict) -> list[_Row]:
    """(kernel, what, value, floor, goal, whether less is better) of the mixture of experts."""
    rows: list[_Row] = []
    models, modes, products = ("gpt-oss-20b", "qwen3-30b-a3b"), ("balanced", "zipf"), ("gate_up", "down")
    over = (("of_dense", "speed over a dense product"), ("of_torch", "speed over torch's grouped product"))
    for key, beside in over:
        for case in modes:
            floor, goal = ((0.80, 0.92) if case == "balanced" else (0.70, 0.85)) if key == "of_dense" else (1.0, 1.2)
            for model in models:
                for way, what in (("forward", "forward"), ("dx", "dx")):
                    value = min(record[f"{model} {product} {case}"][way][key] for product in products)
                    text = f"{model}, {case}, {what}: {beside}, worse of two"
                    rows.append(("grouped product", text, value, floor, goal, False))
    ragged, ours = record["ragged_dot gpt-oss-20b gate_up"], record["gpt-oss-20b gate_up balanced"]
    value = min(ragged[f"{way}_ms"] / ours[way]["ours_ms"] for way in ("forward", "dx"))
    rows.append(("grouped product", "gpt-oss-20b gate_up: speed over `jax.lax.ragged_dot`", value, 1.0, 1.2, False))
    for model in models:
        for kind in ("nf4", "mxfp4"):
            found = [record[f"four bits {model} {product}"] for product in products]
            for way, words, bounds in (("ahead", "", (0.85, 0.95)), ("decoded", " decoded before", (None, None))):
                value = min(one[f"{kind}_{way}_of_bf16"] for one in found)
                text = f"{model}, experts in {kind.upper()}{words}: speed over bf16 experts, worse of two"
                rows.append(("grouped product", text, value, *bounds, False))
    for model in models:
        shares = ("routing_share_of_step", "routing_share_by_difference")
        share = max(record[f"layer {model} {case}"][share] for case in modes for share in shares)
        rows.append(("routing", f"share of an MoE layer's forward+backward, {model}", share, 0.08, 0.04, True))
    for model in models:
        found = [record[f"gathering {model} {case}"] for case in modes]
        value = min(one[f"{name}_in_order_ms"] / one[f"{name}_gathered_ms"] for one in found for name in _GATHERED)
        text = f"{model}: speed of a product that brings tokens' rows itself over one of sorted rows, worst"
        rows.append(("grouped product", text, value, None, None, False))
    for model in models:
        for name in ("sort", "permute"):
            found = [record[f"routing {model} {case}"] for case in modes]
            value = min(one[f"{name}_reference_ms"] / one[f"{name}_mosaic_ms"] for one in found)
            rows.append(("routing", f"{model}, {name}: speed of our kernel over XLA's", value, None, None, False))
    ways = record["ways gpt-oss-20b"]
    published = {"loop": " (published: 1.23 forward, 1.10 to 1.15 a step)", "ragged_dot": ""}
    for way, words in published.items():
        for key, what in (("forward", "forward"), ("step", "forward+backward")):
            value = ways[f"{way}_{key}_ms"] / ways[f"sorted_{key}_ms"]
            text = f"gpt-oss-20b layer, {what}: time of {way.replace('loop', 'a loop over experts')} over ours{words}"
            rows.append(("sorted segments", text, value, None, None, False))
    same = min(record[f"layer {model} {case}"]["bitwise_over_40_runs"] for model in models for case in modes)
    rows.append(("MoE layer", "40 forwards and gradients bitwise one (1: yes)", float(same), 1.0, None, False))
    checks = ("bitwise_over_40_runs", "bitwise_as_decoded")
    keys = [f"{kind}_ahead_{check}" for kind in ("nf4", "mxfp4") for check in checks]
    same = min(record[f"four bits {model} {product}"][key] for model in models for product in products for key in keys)
    text = "decoded ahead: 40 runs bitwise one, and as decoded before (1: yes)"
    rows.append(("grouped product", text, float(same), 1.0, None, False))
    triton = [record[f"triton {model} down"] for model in models]
    same = min(one["triton_bitwise_over_40_runs"] for one in triton)
    what = "down, 4,096 tokens, Triton's kernel"
    rows.append(("grouped product", f"{what}: 40 runs bitwise one (1: yes)", float(same), 1.0, None, False))
    value = min(one["mosaic_ms"] / one["triton_ms"] for one in triton)
    rows.append(("grouped product", f"{what}: speed over Mosaic's, worse of two", value, None, None, False))
    return rows


def kernel_table(records: list[dict]) -> list[str]:
    """Every kernel's figure beside its floor and goal; a missed floor is said."""
    rows: list[_Row] = []
    for r in records:
        kind = r.get("benchmark")
        if kind == "kernels/attention":
            for entry in r["must_show"]:
                if entry["value"] is not None:
                    lower = "over that predicted" in entry["what"] or "share" in entry["what"]
                    rows.append(("attention", entry["what"], entry["value"], entry["floor"], entry["goal"], lower))
        elif kind == "kernels/quant_matmul":
            bounds = {"1 tokens": (2.5, 3.3), "16 tokens": (2.0, 3.0), "4096 tokens, without LoRA": (0.88, 0.95)}
            bounds |= {"4096 tokens, with LoRA": (0.85, 0.95), "16384 tokens, without LoRA": (0.95, 0.98)}
            bounds |= {"16384 tokens, with LoRA": (0.92, 0.98)}
            for case, (floor, goal) in bounds.items():
                value = r["summary"][case]["geometric_mean"]
                words = "1 token" if case == "1 tokens" else case
                rows.append(("NF4 product", f"{words}: speed over bf16 weights", value, floor, goal, False))
            worst = min(entry["share_of_copy"] for entry in r["dequantise"])
            rows.append(("NF4 dequantise", "share of copy bandwidth, worst shape", worst, 0.8, 0.9, False))
            rows.append(("8-bit AdamW", "share of copy bandwidth", r["adam_8bit"]["share_of_copy"], 0.75, 0.9, False))
        elif kind == "moe":
            rows += moe_rows(r)
    lines = ["| kernel | case | measured | floor | goal |", "|---|---|---|---|---|"]
    for kernel, what, value, floor, goal, lower in rows:
        assert value is not None
        missed = floor is not None and (value > floor if lower else value < floor)
        shown = [f"{value:.3g}" + (" (missed)" if missed else "")]
        shown += ["-" if bound is None else f"{'at most ' if lower else ''}{bound:g}" for bound in (floor, goal)]
        lines.append(f"| {kernel} | {what} | {shown[0]} | {shown[1]} | {shown[2]} |")
    where = ", ".join(
        f"{r['benchmark'].split('/')[-1]} at {r['commit'][:7]}"
        + (f" ({', '.join(r['earlier']['parts'])}: {r['earlier']['commit'][:7]})" if "earlier" in r else "")
        for r in records
    )
    return [*lines, "", f"{records[0]['device']}, jax {records[0]['versions']['jax']}; `benchmarks/kernels/`: {where}."]


def memory_table(record: dict) -> list[str]:
    """What was to be shown of memory; a missed floor is said, and so is what has not been measured."""
    lines = ["| memory, case of `benchmarks/train/memory.py` | measured | floor | goal |", "|---|---|---|---|"]
    for row in record["must_show"]:
        bounds = [
            "-" if bound is None else f"{'at most ' if row['at_most'] else ''}{bound:,.4g}"
            for bound in (row["floor"], row["goal"])
        ]
        value = f"{row['value']:,.0f}" if row["value"] >= 1000 else f"{row['value']:.3g}"
        missed = " (missed)" if row["met"] is False else ""
        lines.append(f"| {row['what']} | {value}{missed} | {bounds[0]} | {bounds[1]} |")
    failed = [f"{name} ({case['failed'].split(' | ')[-1][:80]})" for name, case in record["cases"].items()
              if "failed" in case]  # fmt: skip
    commits = ", ".join(sorted({case["commit"][:7] for case in record["cases"].values() if "commit" in case}))
    where = _versions(record).rsplit(", commit", 1)[0]
    note = f"{where}, commits {commits}. `python benchmarks/train/memory.py --list`."
    return [*lines, "", note + (f" Without a result: {', '.join(failed)}." if failed else "")]


def plot_trajectory(record: dict, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, len(record["ours"]) + 1)
    top.plot(steps, record["torch_peft"], linewidth=2.2, color="#d08770", label="transformers + PEFT")
    top.plot(steps, record["ours"], linewidth=0.9, color="#2e5e8c", label="jaxtune")
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.plot(steps, [a - b for a, b in zip(record["ours"], record["torch_peft"], strict=True)], color="#444444")
    bottom.set_ylabel("difference")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=110)


def measured(records: list[dict]) -> str:
    """The tables of docs/measured.md."""
    parts: list[str] = []
    for r in records:
        if r.get("benchmark") == "train/ablation":
            parts += [*ablation_table(r), ""]
    steps = [r for r in records if r.get("benchmark") == "train/step"]
    profiled = [r for r in steps if "parts" in r]
    if steps:
        parts += step_table([r for r in steps if r not in profiled])
    for r in profiled:
        parts += ["", *parts_table(r)]
    texts = {
        "train/pair": pair_text,
        "train/attention_pair": attention_pair_text,
        "train/packing_metadata": packing_table,
        "train/startup": startup_table,
        "train/qlora_load": load_text,
        "train/trajectory": trajectory_text,
    }
    for kind, text in texts.items():
        for r in records:
            if r.get("benchmark") == kind:
                parts += ["", *text(r)]
    for r in records:
        if r.get("benchmark") == "train/memory" and r["must_show"]:
            parts += ["", *memory_table(r)]
    kernels = [r for r in records if r.get("benchmark") in KERNELS]
    if kernels:
        parts += ["", *kernel_table(kernels)]
    return "\n".join(parts)


def headlines(records: list[dict]) -> list[str]:
    """The README's few figures: speed, memory, start-up."""
    by_kind = {record.get("benchmark"): record for record in records}
    memory, startup = by_kind["train/memory"]["cases"], by_kind["train/startup"]["runs"]
    steps = [r for r in records if r.get("benchmark") == "train/step"]

    def step(shape: str, load_in: str | None, documents: str, length: int = 2048) -> dict:
        return next(
            r for r in steps
            if (r["shape"], r["load_in"], r["documents"], r["length"], r["rows"])
            == (shape, load_in, documents, length, 8)
        )  # fmt: skip

    def speed(record: dict) -> str:
        return f"{record['tokens_per_second']:,.0f} tokens/s in {record['peak_memory_gb']:.1f} GB"

    packed = next(r for r in steps if r["shape"] == "llama-3.1-8b" and r["documents"] == "packed")
    longest = memory["longest"]
    rows = [
        ("Llama-3.1-8B, LoRA in 16 bits, packed rows", speed(packed)),
        ("Llama-3.1-8B, QLoRA within 16 GB", speed(memory["16gb"])),
        ("gpt-oss-20b, QLoRA on attention and experts", speed(step("gpt-oss-20b", "nf4", "full"))),
        (
            "longest single document, Llama-3.1-8B, QLoRA",
            f"{longest['length']:,} tokens in {longest['peak_memory_gb']:.1f} GB",
        ),
        (
            "from the command to the first step done, 8B",
            f"{startup['cached']['first_step']:.0f} s; {startup['cold']['first_step']:.0f} s the first time",
        ),
    ]
    return ["| on one H200 | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]


def _between(text: str, new: str) -> str:
    """The text with `new` between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def written(records: list[dict]) -> dict[Path, str]:
    """Every file that is made from the records, and what it should hold."""
    found = sides(records)
    picture = f"![Speed and peak memory beside others]({PICTURE.relative_to(ROOT).as_posix()})"
    figures = "\n".join([picture, "", caption(found, records), "", *headlines(records)])
    return {
        README: _between(README.read_text(encoding="utf-8"), figures),
        MEASURED: _between(MEASURED.read_text(encoding="utf-8"), measured(records)),
        PICTURE: svg(found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    records = load()
    files = written(records)
    if options.check:
        stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} differs from benchmarks/results: run python benchmarks/table.py")
        return int(bool(stale))
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    for record in records:
        if record.get("benchmark") == "train/trajectory":
            plot_trajectory(record, ROOT / "docs/images/trajectory.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
