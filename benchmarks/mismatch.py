"""How far the log-probabilities of sampled tokens are from those of the training forward, on the same tokens.

    python benchmarks/mismatch.py --output FILE.json [--sets 8] [--repository FOLDER]

The packaged model with an adapter, 16 prompts of 24 tokens and 96 new ones, `sets` times. In each dtype:

    sampled       means of the absolute difference for each set, of tokens that the sampler draws in this dtype.
    same_tokens   the same for tokens that the sampler draws in float32, which are forced on it; so kernels, and
                  commits, are compared on one set of tokens (`checksum`). `of_training` and `of_sampler` are the
                  differences of each from the forward in float32, by which one sees which of the two rounds more.
    ways          means of `same_tokens` with one operation of a decoding step replaced, such as the plain attention.

--repository: the folder of another commit, whose package is measured with this script.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_ROWS, _PROMPT, _NEW = 16, 24, 96


def model_of(root: Path, dtype: str) -> Any:
    import jax
    import jax.numpy as jnp

    import jaxtune
    from jaxtune.models.lora import matrices

    model, _ = jaxtune.from_pretrained(root / "jaxtune" / "quickstart" / "base", dtype=dtype)
    model = jaxtune.get_peft_model(model, r=16)
    for place, (_, linear) in enumerate(matrices(model)):
        assert linear.lora is not None
        b = linear.lora.b
        b.set_value(0.02 * jax.random.normal(jax.random.key(place), b.shape, jnp.float32))
    return model


def prompts_of(number: int) -> list[list[int]]:
    import numpy as np

    return np.random.default_rng(number).integers(3, 200, (_ROWS, _PROMPT)).tolist()


def sampled(model: Any, prompts: list[list[int]]) -> tuple[Any, Any]:
    """(tokens, their log-probabilities), [16, 96] each."""
    import numpy as np

    import jaxtune

    rows = list(jaxtune.Sampler(model, _ROWS, 128).run(prompts, _NEW, temperature=1.0, eos_token_ids=()))
    return np.array([row.ids for row in rows]), np.array([row.logprobs for row in rows], np.float64)


def trained(model: Any, prompts: list[list[int]], tokens: Any) -> Any:
    import numpy as np

    from jaxtune.models.generation.generate import training_logprobs

    return np.array(training_logprobs(model, prompts, tokens.tolist(), _NEW), np.float64)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a module have other values within, and all programs are compiled anew."""
    import jax

    from jaxtune.models.generation import slots

    kept = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    slots.programs.cache_clear()
    jax.clear_caches()
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)
        slots.programs.cache_clear()
        jax.clear_caches()


def forced(sets: list[Any]) -> Callable:
    """In the place of slots._chosen: the next token is that of the set whose number is the row's seed."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    table = jnp.asarray(np.stack(sets), jnp.int32)

    def chosen(vocab_size, kind, logits, seen, rows, length, uniform):
        made = jnp.clip(length - rows.start, 0, table.shape[2] - 1)
        token = table[rows.seed.astype(jnp.int32), rows.index.astype(jnp.int32), made]
        logprobs = jax.nn.log_softmax(logits[:, :vocab_size].astype(jnp.float32))
        return token, jnp.take_along_axis(logprobs, token[:, None], axis=1)[:, 0], None

    return chosen


def of_forced(model: Any, sets: list[Any]) -> list[Any]:
    """The sampler's log-probabilities of the tokens of each set; within `replaced` with `forced`."""
    import numpy as np

    import jaxtune

    sampler, found = jaxtune.Sampler(model, _ROWS, 128), []
    for number, tokens in enumerate(sets):
        requests = [
            sampler.submit(prompt, _NEW, temperature=1.0, seed=number, index=index, eos_token_ids=())
            for index, prompt in enumerate(prompts_of(number))
        ]
        pieces: dict[int, list] = {request: [] for request in requests}
        ids: dict[int, list] = {request: [] for request in requests}
        while sampler.pending:
            for piece in sampler.step():
                pieces[piece.request] += list(piece.logprobs)
                ids[piece.request] += list(piece.ids)
        assert [ids[request] for request in requests] == tokens.tolist()
        found.append(np.array([pieces[request] for request in requests], np.float64))
    return found


def ways_of() -> dict[str, tuple[Any, dict[str, Any]]]:
    """{name: (module, attributes that are replaced)}: one operation of a step is another implementation."""
    from jaxtune.models.generation import plain_layer, slots

    def named(name: str, implementation: str) -> tuple[Any, dict[str, Any]]:
        return plain_layer, {name: functools.partial(getattr(plain_layer, name), implementation=implementation)}

    sampler_options = slots.sampler_options  # itself, while by_vendor is in its place

    def by_vendor(*options: bool) -> dict[str, Any]:
        return sampler_options(*options) | {"xla_gpu_enable_triton_gemm": False}

    return {
        "every layer by Block.step": (plain_layer, {"is_plain": _never}),
        "norms in plain JAX": named("added_norm", "reference"),
        "products by the vendor's library": (slots, {"sampler_options": by_vendor}),
        "heads and attention in two kernels": named("attended", "apart"),
    }


def _never(block: Any, spec: Any) -> bool:
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--sets", type=int, default=8)
    parser.add_argument("--repository", type=Path, default=ROOT)
    options = parser.parse_args()
    sys.path.insert(0, str(options.repository.resolve()))
    import numpy as np

    from benchmarks.record import environment, write
    from jaxtune.models.generation import slots
    from jaxtune.system.program_cache import use_program_cache

    use_program_cache()
    record: dict[str, Any] = {"benchmark": "mismatch", "sets": options.sets, **environment()}
    numbers = range(options.sets)

    def say(name: str, found: Any) -> None:
        record[name] = found
        write(options.output, record)
        print(name, found, flush=True)

    def means(apart: list[Any]) -> dict[str, Any]:
        every = np.abs(np.stack(apart))
        each = every.mean((1, 2))
        return {
            "mean": round(float(each.mean()), 6),
            "sets": [round(float(mean), 6) for mean in each],
            "median": round(float(np.median(every)), 6),
            "rms": round(float(np.sqrt((every**2).mean())), 6),
            "largest": round(float(every.max()), 5),
        }

    exact = model_of(options.repository, "float32")
    sets, apart, right = [], [], []
    for number in numbers:
        tokens, logprobs = sampled(exact, prompts_of(number))
        sets.append(tokens)
        right.append(trained(exact, prompts_of(number), tokens))
        apart.append(logprobs - right[-1])
    say("float32", {"sampled": means(apart), "checksum": [int(np.abs(tokens).sum()) for tokens in sets]})
    for dtype in ("bfloat16", "float16"):
        model, apart = model_of(options.repository, dtype), []
        for number in numbers:
            tokens, logprobs = sampled(model, prompts_of(number))
            apart.append(logprobs - trained(model, prompts_of(number), tokens))
        found: dict[str, Any] = {"sampled": means(apart)}
        say(dtype, found)
        training = [trained(model, prompts_of(number), sets[number]) for number in numbers]
        with replaced(slots, _chosen=forced(sets)):
            own = of_forced(model, sets)
        found["same_tokens"] = {
            **means([a - b for a, b in zip(own, training, strict=True)]),
            "of_training": means([a - b for a, b in zip(training, right, strict=True)]),
            "of_sampler": means([a - b for a, b in zip(own, right, strict=True)]),
        }
        say(dtype, found)
        if dtype != "bfloat16":
            continue
        found["ways"] = {}
        for name, (owner, values) in ways_of().items():
            with replaced(owner, **values), replaced(slots, _chosen=forced(sets)):
                other = of_forced(model, sets)
            found["ways"][name] = {
                "mean": means([a - b for a, b in zip(other, training, strict=True)])["mean"],
                "from_default": means([a - b for a, b in zip(other, own, strict=True)])["mean"],
            }
            say(dtype, found)


if __name__ == "__main__":
    main()
