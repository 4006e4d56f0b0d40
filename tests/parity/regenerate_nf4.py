"""Makes tests/goldens/nf4.npz, what bitsandbytes makes of nf4_cases.py, and tests/goldens/nf4, a tiny checkpoint of
transformers and bitsandbytes with the logits over its dequantised weights. Run it in the environment of `make parity`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import bitsandbytes
import nf4_reference
import reference
from nf4_cases import CONFIG, cases
from tiny import golden_tokens

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
    folder = GOLDENS / "nf4"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        base = reference.make_checkpoint(Path(temporary) / "base", CONFIG)
        nf4_reference.make_checkpoint(base, folder, bnb_4bit_use_double_quant=True)
    logits = nf4_reference.dequantised_logits(folder, CONFIG, golden_tokens() % CONFIG["vocab_size"])
    np.savez_compressed(folder / "expected.npz", logits=logits)
    print({made.name: made.stat().st_size for made in folder.iterdir()})
    print(f"{file.stat().st_size:,} bytes; bitsandbytes {bitsandbytes.__version__}")


if __name__ == "__main__":
    main()
