"""The README's picture: tokens/s and peak memory of one step, ours beside others', drawn from stored records.

`svg` and `caption` are written by `python benchmarks/table.py`. The drawing is plain SVG text, so that the same records
give the same file with any version of any library, and a test can compare it.
"""

from __future__ import annotations

import dataclasses
import statistics
from html import escape

_OURS, _THEIRS = "#2e5e8c", "#b9b9b9"
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
      records: those of benchmarks/results: one `train/pair`, one `train/peers`, one `train/memory` with the cases
        24gb and 10.8gb, and a `train/step` in bf16 of whole rows.
    """
    by_kind = {record.get("benchmark"): record for record in records}
    pair, peers, cases = by_kind["train/pair"], by_kind["train/peers"], by_kind["train/memory"]["cases"]
    [kept] = [
        record for record in records
        if record.get("benchmark") == "train/step" and record["shape"] == "llama-3.1-8b" and record["load_in"] is None
        and (record["rows"], record["length"], record["documents"]) == (8, 2048, "full")
    ]  # fmt: skip
    tokens = pair["rows"] * pair["length"]
    theirs = Side(
        "Hugging Face + PEFT", None, tokens / statistics.median(pair["hf_peft_step_seconds"]), pair["hf_peft_peak_gb"],
        "every layer" if pair["hf_peft_gradient_checkpointing"] == "on" else "nothing", False,
    )  # fmt: skip
    others = [
        Side(one["name"], one["load_in"], one["tokens_per_second"], one["peak_memory_gb"], one["recomputes"], False)
        for one in peers["peers"]
    ]
    ours = [
        # The speed is that of the session in which the other side ran, the memory that of the same program alone.
        dataclasses.replace(
            _ours("jaxtune, all memory", kept),
            tokens_per_second=tokens / statistics.median(pair["ours_step_seconds"]),
        ),
        _ours("jaxtune, memory.budget_gb=10.8", cases["10.8gb"]),
        _ours("jaxtune, memory.budget_gb=24", cases["24gb"]),
    ]
    for record in (peers, kept, cases["10.8gb"], cases["24gb"]):
        same = [record[key] == pair[key] for key in ("shape", "rows", "length")] + [record["adapter_rank"] == 16]
        if not all(same):
            raise ValueError(f"{record['benchmark']}: another shape, rows, length or rank than train/pair's")
    found = [theirs, *others, *ours]
    return [side for load_in in (None, "nf4") for side in found if side.load_in == load_in]


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
    [peers] = [record for record in records if record.get("benchmark") == "train/peers"]
    parts = "; ".join(f"{side.name}{'' if side.load_in is None else ' (NF4)'}: {side.recomputes}" for side in found)
    return (
        f"Computed again in the backward, by side: {parts}. Recomputing saves memory and costs speed, so compare both "
        f"columns. Unsloth was measured {peers['measured']}, Hugging Face + PEFT in the "
        "same session as ours. Weights are random."
    )
