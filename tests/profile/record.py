"""Records the golden traces of tests/profile/data on a GPU, in under a minute:

    python tests/profile/record.py FOLDER

ours.xplane.pb.gz (jaxtune, LoRA), flax.xplane.pb.gz (a plain flax program), torch.json.gz (transformers + PEFT).
The numbers that the tests compare with are in expected.json there: `python tests/profile/record.py --expect` writes
them anew from the traces, on any machine; look at the difference before keeping it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

SHAPE = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ROWS, LENGTH, STEPS = 8, 1024, 3
DATA = Path(__file__).parent / "data"


def record_ours(folder: Path) -> None:
    from benchmarks.train.profile_pair import record_ours

    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "profile"
        print("ours", record_ours(target, SHAPE, ROWS, LENGTH, STEPS))
        shutil.copy(target / "trace.xplane.pb.gz", folder / "ours.xplane.pb.gz")


def record_flax(folder: Path) -> None:
    """A training loop as the flax guide has it: nothing of jaxtune but the capture."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jaxtune

    class MLP(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(1024, 4096, rngs=rngs)
            self.norm = nnx.LayerNorm(4096, rngs=rngs)
            self.second = nnx.Linear(4096, 1024, rngs=rngs)

        def __call__(self, x):
            with jax.named_scope("mlp"):
                return self.second(self.norm(nnx.gelu(self.first(x))))

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x, y):
        def loss_fn(model):
            predicted = model(x)
            with jax.named_scope("loss"):
                return jnp.mean((predicted - y) ** 2)

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        with jax.named_scope("optimizer"):
            optimizer.update(model, gradients)
        return loss

    x, y = jax.random.normal(jax.random.key(1), (2, 4096, 1024))
    for _ in range(3):
        train_step(model, optimizer, x, y)
    with tempfile.TemporaryDirectory() as scratch:
        with jaxtune.profile.capture(Path(scratch) / "profile"):
            for step in range(STEPS):
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    train_step(model, optimizer, x, y)
        shutil.copy(Path(scratch) / "profile" / "trace.xplane.pb.gz", folder / "flax.xplane.pb.gz")


def record_torch(folder: Path) -> None:
    from benchmarks.train.profile_pair import record_hf

    print("torch", record_hf(folder / "torch.json.gz", SHAPE, ROWS, LENGTH, 2, "off"))


def write_expected() -> None:
    from tests.profile.golden import GOLDEN, figures

    table = {name: figures(DATA / file) for name, file in GOLDEN.items() if (DATA / file).is_file()}
    (DATA / "expected.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    if sys.argv[1:] == ["--expect"]:
        write_expected()
        return 0
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 3:
        {"ours": record_ours, "flax": record_flax, "torch": record_torch}[sys.argv[2]](folder)
        return 0
    sides = ("ours", "flax", "torch")  # a process each: JAX and torch do not share a GPU's memory well
    failed = [s for s in sides if subprocess.run([sys.executable, __file__, str(folder), s], check=False).returncode]
    print(f"recorded into {folder}" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
