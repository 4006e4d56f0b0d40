"""Beside peers, on one card: their own trainers and jaxtune, the same shape, rows and steps.

    pip install unsloth trl peft bitsandbytes liger-kernel     # what is missing is recorded as failed
    python -m benchmarks.peers sft       --output DIR [--formats bf16,nf4] [--peers unsloth,trl] [--seconds 560]
    python -m benchmarks.peers sft       --output DIR --documents FILE  # packed rows (peers/documents.py makes FILE)
    python -m benchmarks.peers published --output DIR  # jaxtune at shapes of which prime-rl publishes figures
    python benchmarks/rewards.py --output DIR/grpo.json 8b trl_8b  # steps of GRPO, jaxtune's and TRL's

Each process has the card alone. DIR/CARD.json is written as figures come, and a further call with the same DIR adds to
it; copy it to benchmarks/results/peers, and `python -m benchmarks.proof page` puts it on the page. The model is a
random checkpoint of 16 GB, written to --model (a temporary folder) once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", choices=("sft", "published"))
    parser.add_argument("--output", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir(), "random-llama-3.1-8b"))
    parser.add_argument("--formats", default="bf16,nf4")
    parser.add_argument("--peers", default="unsloth", help="that a setting's name begins with: unsloth, trl, trl liger")
    parser.add_argument("--documents", type=lambda text: Path(text).resolve(), help="real documents, which are packed")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--each", type=float, default=150, help="seconds of one peer's setting at most")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    from benchmarks.peers import published, sft

    if options.experiment == "published":
        published.run(options.output, options.seconds)
        return 0
    kinds = options.formats.split(",")
    if unknown := set(kinds) - set(sft.FORMATS):
        parser.error(f"--formats: no {', '.join(sorted(unknown))}; there are {', '.join(sft.FORMATS)}")
    names = options.peers.split(",")
    if unknown := [name for name in names if not any(peer.name.startswith(name) for peer in sft.PEERS)]:
        parser.error(f"--peers: no {', '.join(unknown)}; there are {', '.join(peer.name for peer in sft.PEERS)}")
    timing = options.seconds, options.each, options.steps
    sft.run(options.model, options.output, kinds, names, *timing, options.documents)
    return 0


if __name__ == "__main__":
    sys.exit(main())
