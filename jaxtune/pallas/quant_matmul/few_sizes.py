"""What products of few rows share by 16-bit weights, by codes and in FP8."""

from __future__ import annotations

NUMBERS: dict[str | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}  # of activations, in the kernels
ENOUGH = 96  # programs that occupy a Hopper GPU well enough: fewer splits are less to add


def padded(rows: int) -> int:
    """Rows of x, or ranks, that tensor cores multiply: the next power of two, at least 16."""
    return max(16, 1 << (rows - 1).bit_length())


def fewest_splits(steps: int, programs: int) -> int:
    """Equal splits of a product, 1 to 8, of two steps of columns or more: the fewest that occupy the multiprocessors,
    else the most.

      steps: of the summed columns. programs: tiles of the weights' rows.
    """
    fitting = [n for n in range(1, 9) if steps % n == 0 and (n == 1 or steps // n >= 2)]
    return next((n for n in fitting if n * programs >= ENOUGH), fitting[-1])
