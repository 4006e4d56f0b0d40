"""Makes tests/goldens/adam8.npz from bitsandbytes. Run it in the environment of `make parity`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import adam8_reference
import bitsandbytes

from tests.train.adam8_cases import GOLDEN


def main() -> None:
    np.savez_compressed(GOLDEN, **adam8_reference.run())
    print(f"bitsandbytes {bitsandbytes.__version__}")


if __name__ == "__main__":
    main()
