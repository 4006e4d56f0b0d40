"""The golden traces, and the figures of a trace that the tests hold them to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtune.profile import Report, show

DATA = Path(__file__).parent / "data"
GOLDEN = {"ours": "ours.xplane.pb.gz", "flax": "flax.xplane.pb.gz", "torch": "torch.json.gz"}


def figures(file: Path) -> dict[str, Any]:
    """Every table of a trace, rounded to what a double holds on any machine."""
    return figures_of(show(file))


def figures_of(report: Report) -> dict[str, Any]:
    def digits(value: float) -> float:
        return float(f"{value:.6g}")

    return {
        "device": report.device,
        "steps_ms": [digits(ms) for ms in report.steps_ms],
        "gflops_per_step": digits(report.flops_per_step / 1e9),
        "categories_ms": {row.name: digits(row.ms) for row in report.categories},
        "scopes_ms": {f"{row.name} {row.phase}".strip(): digits(row.ms) for row in report.scopes},
        "kernels": [
            [
                row.name,
                row.category,
                f"{row.scope} {row.phase}".strip(),
                digits(row.count),
                digits(row.ms),
                digits(row.tflops),
                digits(row.tbps),
            ]
            for row in report.kernels[:20]
        ],
        "transfers_ms": {row.name: [digits(row.ms), digits(row.exposed_ms)] for row in report.transfers},
        "launch_gaps": digits(report.idle.launch_gaps),
        "idle_ms": digits(report.idle.ms),
        "buffers": [[row["what"], row["count"], row["bytes"]] for row in report.buffers[:5]],
    }
