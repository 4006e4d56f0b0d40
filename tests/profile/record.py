"""Records flax.xplane.pb.gz of tests/profile/data, a plain flax program, on a GPU:

    python tests/profile/record.py FOLDER

ours.xplane.pb.gz (jaxtune, LoRA) and torch.json.gz (transformers + PEFT) are of a script that has left the tree,
`git show 0f72794:tests/profile/record.py` with benchmarks/train/profile_pair.py of that commit. The numbers that the
tests compare with are in expected.json there: `python tests/profile/record.py --expect` writes them anew from the
traces, on any machine; look at the difference before keeping it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STEPS = 3
DATA = Path(__file__).parent / "data"


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
    record_flax(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
