"""Makes tests/goldens/peft/*: adapters as PEFT writes them, and what PEFT computes with them.

Run it in the environment of `make parity`, with names of cases, or for all. expected.npz holds the logits of the golden
tokens and one merged weight.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))

import peft
import peft_reference
import reference
from peft_cases import GOLDEN_CASES
from safetensors.numpy import load_file
from tiny import CONFIGS, golden_tokens

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "peft"


def main() -> None:
    for case, (config, settings) in GOLDEN_CASES.items():
        if sys.argv[1:] and case not in sys.argv[1:]:
            continue
        folder = GOLDENS / case
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory() as temporary:
            base = reference.make_checkpoint(Path(temporary) / "base", CONFIGS[config])
            made = Path(temporary) / "adapter"
            peft_reference.make_adapter(base, made, settings)
            folder.mkdir(parents=True)
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                text = (made / name).read_bytes()
                (folder / name).write_bytes(
                    text.replace(str(base).encode(), b"base") if name.endswith("json") else text
                )
            model = peft_reference.load(base, made)
            logits = reference.logits(model, golden_tokens())
            weights = peft_reference.merged_weights(model)
        adapted = sorted(key for key in load_file(folder / "adapter_model.safetensors") if "lora_A" in key)
        name = adapted[len(adapted) // 2].removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        if ".experts." in name:
            name = re.sub(r"\.(base_layer\.)?weight$", ".gate_up_proj", name)
        np.savez_compressed(folder / "expected.npz", logits=logits, merged_name=name, merged=weights[name])
        print(f"{case}: {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")
    print(f"peft {peft.__version__}")


if __name__ == "__main__":
    main()
