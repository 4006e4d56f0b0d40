"""Writes docs/measured.md, the README's picture and its few figures from the JSON under benchmarks/results/.

    python benchmarks/table.py            # rewrites them, the texts between their markers
    python benchmarks/table.py --check    # fails if one differs

A training record whose first loss is not near ln V, or in which a trained matrix had no gradient by step 2, proves
nothing and is an error here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.chart import caption, sides, svg  # noqa: E402
from benchmarks.record import RESULTS, honest  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402
from benchmarks.train.mesh import CASES as MESH_CASES  # noqa: E402

README, MEASURED, PICTURE = ROOT / "README.md", ROOT / "docs/measured.md", ROOT / "docs/images/speed_and_memory.svg"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"  # of what is written here


class Rejected(ValueError):
    """A record that must not stand in a table."""


def load(folder: Path = RESULTS) -> list[dict]:
    """The records of a folder, by file name; of steps.json, each step's.

    Raises:
      Rejected: a training record that proves nothing.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        steps = {} if "benchmark" in record else record
        for name, step in steps.items():
            problem = honest(step)
            if problem is not None:
                raise Rejected(f"{path.name}: {name}: {problem}")
        records += steps.values() if steps else [record]
    return records


def _versions(record: dict) -> str:
    cudnn = next((v for k, v in record["versions"].items() if k.startswith("nvidia-cudnn")), "none")
    commits = ", ".join(commit[:7] for commit in record["commit"].split(", "))
    return f"{record['device']}, jax {record['versions']['jax']}, cuDNN {cudnn}, commit {commits}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _residuals(record: dict) -> str:
    parts = record.get("micro_batches", 1)
    budget = record.get("budget_gb")
    chosen = record["residuals"] if record["residuals"] in ("keep", "recompute", "fp8") else "mixed"
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
        if r.get("objective", "sft") != "sft":
            what += f", {r['objective']}"
        base = r.get("load_in") or "bf16"
        if r.get("compute"):
            base += f" ({'128 x 128' if r['scales'] == 'blocks' else 'rows'}, products too)"
        documents = {"full": "one a row", "pairs": "two a row"}.get(
            r["documents"], f"packed, up to {r['max_documents']} a row"
        )
        mfu = "-" if r["mfu"] is None else f"{100 * r['mfu']:.1f} %"
        lines.append(
            f"| {r['shape']} {base} {what} | {r['rows']} x {r['length']:,} | {documents} "
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


def rows_of(rows: list[dict], with_kernel: bool) -> list[str]:
    """Figures beside their floors and goals; a missed floor is said."""
    lines = []
    for row in rows:
        value, floor, at_most = row["value"], row["floor"], row["at_most"]
        missed = floor is not None and (value > floor if at_most else value < floor)
        cells = [row["kernel"]] if with_kernel else []
        cells += [row["what"], (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") + (" (missed)" if missed else "")]
        cells += [
            "-" if bound is None else f"{'at most ' if at_most else ''}{bound:,.4g}" for bound in (floor, row["goal"])
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def kernel_table(records: list[dict]) -> list[str]:
    lines = ["| kernel | case | measured | floor | goal |", "|---|---|---|---|---|"]
    lines += [line for record in records for line in rows_of(record["must_show"], with_kernel=True)]
    where = ", ".join(f"{r['benchmark'].removeprefix('kernels/')} at {r['commit'][:7]}" for r in records)
    return [*lines, "", f"{records[0]['device']}, jax {records[0]['versions']['jax']}; `benchmarks/kernels/`: {where}."]


def memory_table(record: dict) -> list[str]:
    """What was to be shown of memory, and what has no result."""
    lines = ["| memory, case of `benchmarks/train/memory.py` | measured | floor | goal |", "|---|---|---|---|"]
    lines += rows_of(record["must_show"], with_kernel=False)
    failed = [f"{name} ({case['failed'].split(' | ')[-1][:80]})" for name, case in record["cases"].items()
              if "failed" in case]  # fmt: skip
    commits = ", ".join(sorted({case["commit"][:7] for case in record["cases"].values() if "commit" in case}))
    where = _versions(record).rsplit(", commit", 1)[0]
    note = f"{where}, commits {commits}. `python benchmarks/train/memory.py --list`."
    return [*lines, "", note + (f" Without a result: {', '.join(failed)}." if failed else "")]


def mesh_table(record: dict) -> list[str]:
    """Steps over several GPUs, beside the same step on each alone."""
    lines = [
        f"| step, on {record['devices']} GPUs | tokens/s a GPU | over the slower GPU alone | floor | peak GB a GPU |",
        "|---|---|---|---|---|",
    ]
    for name, runs in record["cases"].items():
        case = MESH_CASES[name]
        if any("failed" in run for run in runs):
            continue
        speeds = " and ".join(f"{run['tokens_per_second_per_gpu']:,.0f}" for run in runs)
        peaks = " and ".join(f"{max(run['peak_memory_gb_of_each']):.1f}" for run in runs)
        ratio, beside = record["ratios"].get(name), "-"
        if ratio is not None:
            beside = f"**{ratio['speed']:.3f}**" + (" (missed)" if ratio["speed"] < (case.floor or 0) else "")
            peaks += f" ({ratio['memory']:.2f} of it alone)"
            exposed = {row[0]: row[2] for row in runs[0].get("parts", {}).get("transfers", ())}
            if "collectives" in exposed:
                beside += f", {exposed['collectives']:.0f} ms of collectives under no kernel"
        mesh = f"mesh.{case.axis}={record['devices']}" if case.axis else "each alone, at once"
        mesh += "" if runs[0]["micro_batches"] == 1 else f", {runs[0]['micro_batches']} micro-batches"
        floor = case.floor or (f"{case.least:,} tokens/s" if case.least else "-")
        lines.append(f"| {case.title}, {case.rows} x 2,048 a GPU, {mesh} | {speeds} | {beside} | {floor} | {peaks} |")
    said = "A ratio is of runs of one call, though another run of the step alone may stand here since."
    return [*lines, "", f"{_versions(record)}. {said} `python benchmarks/train/mesh.py --help`."]


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
        "train/mesh": mesh_table,
        "train/startup": startup_table,
        "train/memory": memory_table,
    }
    for kind, text in texts.items():
        for r in records:
            if r.get("benchmark") == kind:
                parts += ["", *text(r)]
    kernels = [r for r in records if r.get("benchmark", "").startswith("kernels/") and "must_show" in r]
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
    divided = by_kind["train/mesh"]["cases"]["70b_nf4_fsdp"][0]
    on_two = f"{divided['tokens_per_second_per_gpu']:,.0f} tokens/s in {max(divided['peak_memory_gb_of_each']):.1f} GB"
    longest = memory["longest"]
    rows = [
        ("Llama-3.1-8B, LoRA in 16 bits, packed rows", speed(packed)),
        ("Llama-3.1-8B, QLoRA within 16 GB", speed(memory["16gb"])),
        ("gpt-oss-20b, QLoRA on attention and experts", speed(step("gpt-oss-20b", "nf4", "full"))),
        ("Llama-3.3-70B, QLoRA over two H200s, each", on_two),
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
