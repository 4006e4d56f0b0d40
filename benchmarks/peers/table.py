"""What a record of peers says: the table of docs/proof.md, the README's picture and the sentences under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

Record = Mapping[str, Any]
_WEIGHTS = {"bf16": "16 bits", "nf4": "NF4"}
_OURS, _THEIRS = "#2e5e8c", "#b9b9b9"
_WIDTH, _LEFT, _BAR, _ROW, _TOP = 860, 310, 180, 30, 58


def program(name: str, versions: Mapping[str, str]) -> str:
    """A setting's name in the record, such as "trl liger true", in words."""
    words = name.split()
    recompute = {"unsloth": '"unsloth"', "true": "True", "false": "False"}[words[-1]]
    if "unsloth" in words[:-1]:
        padded = ", padding_free=False" * ("padded" in words)
        return f"Unsloth {versions.get('unsloth', '')}, use_gradient_checkpointing={recompute}{padded}"
    liger = " + Liger" * ("liger" in words)
    return f"TRL {versions.get('trl', '')} + PEFT{liger}, gradient_checkpointing={recompute}"


def settings(record: Record, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, case) of the peers' settings."""
    for name, case in record["cases"][kind].items():
        if not name.startswith("jaxtune "):
            yield name, case


def lines(record: Record) -> list[str]:
    """The table: every setting at its fastest micro-batch, and jaxtune within its peak memory."""
    found = [
        "| weights | program | rows at once | tokens/s | peak GB | jaxtune in that memory, tokens/s | GB | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in record["cases"]:
        for name, case in settings(record, kind):
            cells = [_WEIGHTS[kind], program(name, record["versions"])]
            best, ours = case.get("fastest"), case.get("beside")
            if best is None:
                cells += [f"failed: {_problem(case)}", *"-----"]
            else:
                cells += [
                    f"{best['micro_batch']}",
                    f"{best['tokens_per_second']:,.0f}",
                    f"{best['peak_memory_gb']:.1f}",
                ]
                cells += [*_figures(ours), f"**{ours['ratio']:.2f}**"] if ours else ["-", "-", "-"]
            found.append("| " + " | ".join(cells) + " |")
        whole = record["cases"][kind].get("jaxtune whole card", {})
        if "tokens_per_second" in whole:
            cells = [_WEIGHTS[kind], "jaxtune, the whole card", f"{8 // whole['micro_batches']}"]
            cells += [*_figures(whole), "-", "-", "-"]
            found.append("| " + " | ".join(cells) + " |")
    return found


def _figures(case: Mapping[str, Any]) -> list[str]:
    return [f"{case['tokens_per_second']:,.0f}", f"{case['peak_memory_gb']:.1f}"]


def _problem(case: Mapping[str, Any]) -> str:
    tried = [one["failed"] for one in case.get("tried", ()) if "failed" in one]
    return (case.get("failed") or (tried or ["no figure"])[-1]).replace("|", "/").replace("\n", " ")[:80]


def text(record: Record) -> str:
    """What the table compares, and how it was measured."""
    said = record["settings"]
    return (
        f"{said['adapter']} of an 8B in the shape of Llama-3.1 (random weights), {said['rows']} rows of "
        f"{said['length']:,} tokens a step, AdamW, on one {record['device']}. Each peer runs in its own "
        f"trainer, at the fastest of its micro-batches, {said['timed_steps']} steps after two; peaks are those of each "
        "program's allocator. jaxtune has no more than each peak; its planner chooses the rest. A ratio is jaxtune's "
        f"tokens/s over the peer's, in no more memory. {_padding(record)} {record.get('note', '')}".rstrip()
    )


def _padding(record: Record) -> str:
    names = {name for cases in record["cases"].values() for name in cases}
    said = "Unsloth joins the rows of a micro-batch without padding unless padding_free=False is given"
    return f"{said}." if any(name.startswith("padded") for name in names) else f"{said}, which was not measured."


def versions(record: Record) -> str:
    names = ("unsloth", "trl", "peft", "bitsandbytes", "liger-kernel", "transformers", "torch", "triton", "jax")
    named = ", ".join(f"{name} {record['versions'][name]}" for name in names if name in record["versions"])
    return f"{record['device']}, {named}, commit {record['commit'][:7]}"


def _unsloth(record: Record, kind: str, recompute: str) -> Mapping[str, Any] | None:
    """Unsloth's case of use_gradient_checkpointing, padded or not, that is the faster."""
    cases = [record["cases"][kind].get(name, {}) for name in (f"unsloth {recompute}", f"padded unsloth {recompute}")]
    done = [case for case in cases if case.get("fastest")]
    return max(done, key=lambda case: case["fastest"]["tokens_per_second"]) if done else None


def sentences(record: Record) -> str:
    """Of the README: jaxtune beside Unsloth's default, which recomputes, and beside kept activations."""
    parts = []
    for kind in record["cases"]:
        ratios = {name: (_unsloth(record, kind, name) or {}).get("beside") for name in ("unsloth", "false")}
        if all(ratios.values()):
            parts.append((kind, ratios["unsloth"]["ratio"], ratios["false"]["ratio"]))
    if not parts:
        return ""
    recomputed = ", ".join(f"{default:.2f} ({_WEIGHTS[kind]})" for kind, default, _ in parts)
    kept = ", ".join(f"{false:.2f} ({_WEIGHTS[kind]})" for kind, _, false in parts)
    return (
        f"An 8B trains at {recomputed} times the rate of Unsloth's default, which recomputes every layer,\n"
        f"and at {kept} times that of Unsloth without recomputing, "
        "[in no more memory](docs/proof.md#beside-unsloth-trl-and-peft)."
    )


def packed(record: Record) -> str:
    """The part of the page of real rows that every program packs."""
    said, note = record["settings"], f"{versions(record)}. `python -m benchmarks.peers sft --documents FILE`"
    text = (
        f"As above, with real rows: {said['documents']} into {said['rows']} rows of {said['length']:,} a step, by "
        "TRL's `packing=True`; in no program a token sees another document. Tokens are real ones, without padding. "
        f"{record.get('note', '')}"
    ).rstrip()
    return "\n".join(["## Packed rows beside Unsloth and TRL", "", text, "", *lines(record), "", note, ""])


def published(record: Record) -> str:
    """The part of the page of figures that others publish for one card of another machine."""
    rows = ["| shape | published, one H100 | jaxtune here, tokens/s | peak GB |", "|---|---|---|---|"]
    for case in record["cases"].values():
        if "tokens_per_second" in case:
            theirs = f"{case['published_tokens_per_second']:,} (`{case['source'].rpartition('/')[2]}`)"
            rows.append(f"| {case['what']} | {theirs} | {' | '.join(_figures(case))} |")
    text = (
        "prime-rl's own figures, from the JSON in `benchmarks/baselines` of its repository: another machine, and every "
        "layer recomputed, so no ratio is made of them."
    )
    note = f"{record['device']}, commit {record['commit'][:7]}. `python -m benchmarks.peers published`"
    return "\n".join(["## Shapes that prime-rl publishes", "", text, "", *rows, "", note, ""])


def rewarded(record: Record) -> str:
    """The part of the page of GRPO's steps, jaxtune's and TRL's."""
    rows = ["| program | s a step | peak GB |", "|---|---|---|"]
    named = {"8b": "jaxtune", "trl_8b": "TRL with transformers' generation"}
    for name, program_name in named.items():
        if step := record["cases"].get(name, {}).get("whole_step"):
            rows.append(f"| {program_name} | {step['seconds']:.1f} | {step['peak_memory_gb']:.1f} |")
    text = (
        "An 8B of random weights, LoRA r=16 in 16 bits: 8 prompts of 200 tokens, 8 answers each, none shorter than 512."
    )
    note = f"{record['device']}, commit {record['commit'][:7]}. `python benchmarks/rewards.py --output FILE 8b trl_8b`"
    return "\n".join(["## Steps of GRPO beside TRL", "", text, "", *rows, "", note, ""])


@dataclass(frozen=True)
class Bar:
    name: str
    tokens_per_second: float
    memory_gb: float
    ours: bool


def bars(record: Record, kind: str) -> list[Bar]:
    """Peers, then jaxtune within the peak of Unsloth's default and on the whole card."""
    cases = record["cases"][kind]
    peers = {words: cases.get(name) for name, words in _LIGER.items()}
    peers |= {words: _unsloth(record, kind, name) for name, words in _UNSLOTH.items()}
    found = [
        Bar(words, case["fastest"]["tokens_per_second"], case["fastest"]["peak_memory_gb"], False)
        for words, case in peers.items()
        if case and case.get("fastest")
    ]
    ours = {"in the memory of Unsloth's default": (_unsloth(record, kind, "unsloth") or {}).get("beside")}
    ours["all memory"] = cases.get("jaxtune whole card")
    return found + [
        Bar(f"jaxtune, {where}", case["tokens_per_second"], case["peak_memory_gb"], True)
        for where, case in ours.items()
        if case and "tokens_per_second" in case
    ]


_LIGER = {
    "trl liger true": "TRL + PEFT + Liger, recomputing",
    "trl liger false": "TRL + PEFT + Liger, kept activations",
}
_UNSLOTH = {"unsloth": "Unsloth's default, recomputing", "false": "Unsloth, kept activations"}


def svg(record: Record) -> str:
    """The bars: tokens/s on the left, peak memory on the right."""
    groups = {kind: bars(record, kind) for kind in record["cases"]}
    every = [bar for group in groups.values() for bar in group]
    height = _TOP + _ROW * (len(every) + len(groups)) + 12
    most = (max(bar.tokens_per_second for bar in every), max(bar.memory_gb for bar in every))
    said, right = record["settings"], _LEFT + _BAR + 100
    title = f"LoRA r=16 on an 8B, one {record['device']}, {said['rows']} x {said['length']:,} tokens a step"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="48" fill="#444">tokens/s (more is better)</text>',
        f'<text x="{right}" y="48" fill="#444">peak memory, GB (less is better)</text>',
    ]
    y = _TOP
    for kind, group in groups.items():
        y += _ROW
        words = "16-bit weights" if kind == "bf16" else "four-bit weights (NF4)"
        drawn.append(f'<text x="12" y="{y - 8}" font-weight="bold" fill="#444">{words}</text>')
        for bar in group:
            colour = _OURS if bar.ours else _THEIRS
            drawn.append(f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(bar.name)}</text>')
            for x, value, largest, label in (
                (_LEFT, bar.tokens_per_second, most[0], f"{bar.tokens_per_second:,.0f}"),
                (right, bar.memory_gb, most[1], f"{bar.memory_gb:.1f}"),
            ):
                width = round(_BAR * value / largest, 1)
                drawn.append(f'<rect x="{x}" y="{y}" width="{width}" height="20" fill="{colour}"/>')
                drawn.append(f'<text x="{x + width + 6}" y="{y + 15}">{label}</text>')
            y += _ROW
    return "\n".join([*drawn, "</svg>", ""])
