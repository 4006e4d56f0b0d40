"""The command `jaxtune tune`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.system.terminal import say


# arguments: the words after `jaxtune tune`: the op, "attention" (the default) or "grouped_matmul", and options. Those
# for shapes are attention's alone; --dtype and --output are for both. Progress and the fastest sizes are printed on
# stdout. ValueError: JAX has no Hopper GPU. RuntimeError: no candidate runs, or the kernel with its default sizes is
# wrong here.
def run(arguments: Sequence[str]) -> None:
    """Measure the kernels' block sizes on this GPU and keep the fastest.

    Attention is measured for your shapes, grouped_matmul (experts) for those of gpt-oss-20b and Qwen3-30B-A3B. The
    fastest sizes are stored in your cache, from which the kernels read them, or in --output. It needs a Hopper GPU.
    """
    parser = common.parser("tune", run.__doc__)
    parser.add_argument("op", nargs="?", choices=["attention", "grouped_matmul"], default="attention")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], metavar="N", help="default: 64 128")
    parser.add_argument("--heads", type=int, default=32, metavar="N", help="number of query heads (default: 32)")
    parser.add_argument(
        "--kv-heads", type=int, default=8, metavar="N", help="number of key and value heads (default: 8)"
    )
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="rows of a step (default: 4)")
    parser.add_argument("--length", type=int, default=8192, metavar="N", help="tokens of a row (default: 8192)")
    parser.add_argument(
        "--documents",
        choices=["packed", "whole"],
        default="packed",
        help="log-normal lengths of mean 512, or one a row",
    )
    parser.add_argument("--window", type=int, metavar="N", help="sliding window, tokens")
    parser.add_argument("--soft-cap", type=float, metavar="X", help="soft cap of the scores, as in Gemma 2")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--kernels", nargs="+", choices=["forward", "dquery", "dkey", "dvalue"], help="default: all")
    parser.add_argument("--output", type=Path, help="the JSON file to add to; default: your cache, which is used here")
    options = parser.parse_args(arguments)
    import jaxtune
    from jaxtune.pallas import targets
    from jaxtune.pallas.attention.shapes import Case
    from jaxtune.pallas.attention.tune import KERNELS
    from jaxtune.pallas.attention.tune import tune as measure

    if targets.here() is not targets.HOPPER:
        raise ValueError("tune: only kernels for Hopper GPUs have blocks to measure, and there is none")
    jaxtune.use_program_cache()
    tell = functools.partial(say, end="", flush=True)

    def fastest(product, entry):
        blocks = ", ".join(f"{name} {value}" for name, value in entry["blocks"].items())
        say(f"{product}: fastest {blocks}: {entry['milliseconds']:.4f} ms")

    if options.op == "grouped_matmul":
        from jaxtune.pallas.grouped_matmul.tune import tune as measure_grouped

        for product, entry in measure_grouped(options.dtype, tell, options.output).items():
            fastest(f"grouped_matmul {product}", entry)
        return
    documents = "log-normal" if options.documents == "packed" else None
    for dim in options.head_dim:
        case = Case(
            "tune",
            options.rows,
            options.length,
            options.heads,
            options.kv_heads,
            dim,
            documents,
            options.window,
            options.soft_cap,
        )
        fastest_entries = measure(case, options.kernels or KERNELS, options.dtype, tell, options.output)
        for kernel, entry in fastest_entries.items():
            fastest(f"attention {kernel}, head dim {dim}", entry)
