"""Writes the tables of docs/measured.md and notes/kernels.md, and the README's few figures, from benchmarks/results/.

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

from benchmarks.record import RESULTS, honest  # noqa: E402
from benchmarks.shapes import SHAPES  # noqa: E402
from benchmarks.train.mesh import CASES as MESH_CASES  # noqa: E402

README, MEASURED, KERNELS = ROOT / "README.md", ROOT / "docs/measured.md", ROOT / "notes/kernels.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"  # of what is written here


class Rejected(ValueError):
    """A record that must not stand in a table."""


def load(folder: Path = RESULTS) -> dict[str, dict]:
    """The records of a folder, by file name; those of `steps` are records by the steps' names.

    Raises:
      Rejected: a training record that proves nothing.
    """
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    for name, step in records.get("steps", {}).items():
        if problem := honest(step):
            raise Rejected(f"steps.json: {name}: {problem}")
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
    what += ", per-layer embeddings on the host" if record.get("per_layer_embeddings") == "host" else ""
    what += ", embeddings on the host" if record.get("embeddings") == "host" else ""
    what += ", codes transposed, too" if "transposed_codes" in record else ""
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
        if r.get("qat"):
            what += f", QAT {r['qat']}"
        if r.get("precision"):
            what += ", " + ", ".join(f"{pattern}: {word}" for pattern, word in r["precision"].items())
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
    failed = [
        f"{name} ({case['failed'].split(' | ')[-1][:80]})" for name, case in record["cases"].items() if "failed" in case
    ]
    commits = ", ".join(sorted({case["commit"][:7] for case in record["cases"].values() if "commit" in case}))
    where = _versions(record).rsplit(", commit", 1)[0]
    note = f"{where}, commits {commits}. `python benchmarks/train/memory.py --help`."
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


def measured(records: dict[str, dict]) -> str:
    """The tables of docs/measured.md."""
    steps = list(records["steps"].values())
    profiled = [step for step in steps if "parts" in step]
    tables = [step_table([step for step in steps if step not in profiled]), *map(parts_table, profiled)]
    tables += [mesh_table(records["mesh_2"]), startup_table(records["startup_8b"]), memory_table(records["memory"])]
    return "\n\n".join("\n".join(lines) for lines in tables)


def kernels(records: dict[str, dict]) -> str:
    """The table of notes/kernels.md."""
    return "\n".join(kernel_table([r for r in records.values() if r.get("benchmark", "").startswith("kernels/")]))


def headlines(records: dict[str, dict]) -> str:
    """The README's few figures: speed, memory, start-up."""
    steps, memory, startup = records["steps"], records["memory"]["cases"], records["startup_8b"]["runs"]
    divided, longest = records["mesh_2"]["cases"]["70b_nf4_fsdp"][0], memory["longest"]
    peak = max(divided["peak_memory_gb_of_each"])

    cold, cached = startup["cold"]["first_step"], startup["cached"]["first_step"]
    each = divided["tokens_per_second_per_gpu"]

    def speed(record: dict) -> str:
        return f"{record['tokens_per_second']:,.0f} tokens/s in {record['peak_memory_gb']:.1f} GB"

    def in_memory(record: dict) -> str:
        return f"{record['length']:,} tokens in {record['peak_memory_gb']:.1f} GB"

    rows = {
        "Llama-3.1-8B, LoRA in 16 bits, packed rows": speed(steps["8b_packed"]),
        "Llama-3.1-8B, LoRA over [weights and products in FP8](docs/fp8.md)": speed(steps["8b_fp8"]),
        "Llama-3.1-8B, QLoRA within 16 GB": speed(memory["16gb"]),
        "gpt-oss-20b, QLoRA on attention and experts": speed(steps["gpt_oss_nf4"]),
        "Llama-3.3-70B, QLoRA over two H200s, each": f"{each:,.0f} tokens/s in {peak:.1f} GB",
        "longest single document, Llama-3.1-8B, QLoRA": in_memory(longest),
        "from the command to the first step done, 8B": f"{cached:.0f} s; {cold:.0f} s the first time",
    }
    lines = [f"| {what} | {value} |" for what, value in rows.items()]
    return "\n".join(["| on one H200 | measured |", "|---|---|", *lines])


def _between(text: str, new: str) -> str:
    """The text with `new` between its markers."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{new}\n{END}{rest.split(END)[1]}"


def written(records: dict[str, dict]) -> dict[Path, str]:
    """Every file that is made from the records, and what it should hold."""
    texts = {README: headlines(records), MEASURED: measured(records), KERNELS: kernels(records)}
    return {path: _between(path.read_text(encoding="utf-8"), text) for path, text in texts.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    files = written(load())
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
