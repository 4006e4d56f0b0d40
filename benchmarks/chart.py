"""The README's picture: tokens/s and peak memory of one step, ours beside others', drawn from stored records.

`svg` and `caption` are written by `python benchmarks/table.py`. The drawing is plain SVG text, so that the same records
give the same file with any version of any library, and a test can compare it.
"""

from __future__ import annotations

import dataclasses
from html import escape

_OURS, _THEIRS = "#2e5e8c", "#b9b9b9"
_ALL_MEMORY, _IN_24GB = "jaxtune, all memory", "jaxtune, memory.budget_gb=24"
# The cases of benchmarks/train/hf_peft.py that train this model.
_CALLED = {
    "hf_8b": "Hugging Face + PEFT",
    "hf_8b_nf4": "Hugging Face + PEFT",
    "hf_8b_kept": "Hugging Face + PEFT, all memory",
    "hf_8b_nf4_kept": "Hugging Face + PEFT, all memory",
    "8b": _ALL_MEMORY,
    "8b_nf4": _ALL_MEMORY,
    "8b_24gb": _IN_24GB,
}
_WIDTH, _LEFT, _BAR, _ROW, _TOP = 860, 250, 210, 30, 58


@dataclasses.dataclass(frozen=True)
class Side:
    """One program's step. memory_gb: the peak on the device; recomputes: what the backward computes a second time."""

    name: str
    load_in: str | None
    tokens_per_second: float
    memory_gb: float
    recomputes: str
    ours: bool


def sides(records: list[dict]) -> list[Side]:
    """Every program that trained Llama-3.1-8B with LoRA r=16 on 8 x 2,048 tokens, by the records.

    Args:
      records: those of benchmarks/results: one `train/hf_peft` (theirs and ours of one call), one `train/peers`, one
        `train/memory` with the case 10.8gb.
    """
    by_kind = {record.get("benchmark"): record for record in records}
    called, peers = by_kind["train/hf_peft"], by_kind["train/peers"]
    least = by_kind["train/memory"]["cases"]["10.8gb"]
    for record in (called, peers, least):
        if (record["rows"], record["length"], record["adapter_rank"]) != (8, 2048, 16):
            raise ValueError(f"{record['benchmark']}: not 8 rows of 2,048 tokens and a rank of 16")
    others = [
        Side(one["name"], one["load_in"], one["tokens_per_second"], one["peak_memory_gb"], one["recomputes"], False)
        for one in peers["peers"]
    ]
    in_call = _called(called)
    ours = [_ours("jaxtune, memory.budget_gb=10.8", least), *(side for side in in_call if side.ours)]
    ours.sort(key=lambda side: side.memory_gb)
    found = [*(side for side in in_call if not side.ours), *others, *ours]
    return [side for load_in in (None, "nf4") for side in found if side.load_in == load_in]


def _called(record: dict) -> list[Side]:
    """The sides of one call of benchmarks/train/hf_peft.py, theirs first."""
    cases = record["cases"]
    return [
        Side(
            name, case["load_in"], case["tokens_per_second"], case["peak_memory_gb"], case["recomputes"],
            ours=not key.startswith("hf_"),
        )
        for key, name in _CALLED.items()
        if "failed" not in (case := cases.get(key, {"failed": "not run"}))
    ]  # fmt: skip


def _ours(name: str, record: dict) -> Side:
    share = record["recomputing_seconds"] / record["step_seconds"]
    recomputes = "nothing" if share == 0 else f"{100 * share:.0f} % of the step's time"
    return Side(
        name, record["load_in"], record["tokens_per_second"], record["peak_memory_gb"], recomputes, ours=True
    )  # fmt: skip


def svg(found: list[Side]) -> str:
    """The bars: tokens/s on the left, peak memory on the right, a row for each side."""
    groups = [None, "nf4"]
    height = _TOP + _ROW * (len(found) + len(groups)) + 12
    most_tokens = max(side.tokens_per_second for side in found)
    most_memory = max(side.memory_gb for side in found)
    right = _LEFT + _BAR + 100
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        '<text x="12" y="24" font-size="15" font-weight="bold">LoRA r=16 on Llama-3.1-8B, one NVIDIA H200, '
        "8 x 2,048 tokens a step</text>",
        f'<text x="{_LEFT}" y="48" fill="#444">tokens/s (more is better)</text>',
        f'<text x="{right}" y="48" fill="#444">peak memory, GB (less is better)</text>',
    ]
    y = _TOP
    for load_in in groups:
        y += _ROW
        words = "16-bit weights" if load_in is None else "four-bit weights (NF4)"
        lines.append(f'<text x="12" y="{y - 8}" font-weight="bold" fill="#444">{words}</text>')
        for side in (one for one in found if one.load_in == load_in):
            colour = _OURS if side.ours else _THEIRS
            lines.append(f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(side.name)}</text>')
            for x, value, most, text in (
                (_LEFT, side.tokens_per_second, most_tokens, f"{side.tokens_per_second:,.0f}"),
                (right, side.memory_gb, most_memory, f"{side.memory_gb:.1f}"),
            ):
                width = round(_BAR * value / most, 1)
                lines.append(f'<rect x="{x}" y="{y}" width="{width}" height="20" fill="{colour}"/>')
                lines.append(f'<text x="{x + width + 6}" y="{y + 15}">{text}</text>')
            y += _ROW
    return "\n".join([*lines, "</svg>", ""])


def caption(found: list[Side], records: list[dict]) -> str:
    """What the picture's sides recompute, and where they were measured."""
    by_kind = {record.get("benchmark"): record for record in records}
    parts = "; ".join(f"{_named(side)}: {side.recomputes}" for side in found)
    together = ", ".join(_named(side) for side in _called(by_kind["train/hf_peft"]) if side.ours)
    return (
        f"Computed again in the backward, by side: {parts}. Recomputing saves memory and costs speed, so compare both "
        f"columns. Unsloth was measured {by_kind['train/peers']['measured']}, Hugging Face + PEFT in one call with "
        f"{together}. Weights are random."
    )


def _named(side: Side) -> str:
    return f"{side.name}{'' if side.load_in is None else ' (NF4)'}"
