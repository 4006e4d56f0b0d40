"""Makes tests/goldens/nf4.npz: what bitsandbytes makes of nf4_cases.py. Run it in the environment of `make parity`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import bitsandbytes
import nf4_reference
from nf4_cases import cases

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"


def main() -> None:
    golden = {"dynamic_map": nf4_reference.dynamic_map()}
    for name, array in cases().items():
        for double in (False, True):
            made = nf4_reference.quantize(array, double)
            unwanted = ("quant_map",) if double else ("quant_map", "decoded")
            made = {key: value for key, value in made.items() if value is not None and key not in unwanted}
            golden |= {f"{name}/{'double' if double else 'plain'}/{key}": value for key, value in made.items()}
    file = GOLDENS / "nf4.npz"
    np.savez_compressed(file, **golden)
    print(f"{file.stat().st_size:,} bytes; bitsandbytes {bitsandbytes.__version__}")


if __name__ == "__main__":
    main()
