"""A program that ends while a device still computes: WORK WAY, as test_endings.py asks for it.

python ending.py generate return
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
from tiny_models import over, tiny_model

import jaxtune
from jaxtune.models.generation.sampler import Sampler

PROMPTS = [[1, 2, 3, 4]] * 16


def slow_model(**changes):
    """A round of eight tokens takes a fifth of a second, longer than Python takes to end."""
    return tiny_model(hidden_size=1024, intermediate_size=3072, num_heads=8, head_dim=64, **changes)


def in_flight(sampler) -> None:
    """Steps until the rows have ended by their first token, which leaves a round that nobody reads."""
    while sampler.pending:
        sampler.step()


def submitted(sampler, model):
    [first] = jaxtune.generate(model, PROMPTS[:1], 1, eos_token_ids=[])
    for prompt in PROMPTS:
        sampler.submit(prompt, 64, eos_token_ids=first)
    return sampler


def generate() -> None:
    model = slow_model()
    [first] = jaxtune.generate(model, PROMPTS[:1], 1, eos_token_ids=[])
    assert jaxtune.generate(model, PROMPTS, 64, eos_token_ids=first) == [first] * len(PROMPTS)


def held() -> None:
    """The sampler is still there when Python ends."""
    global _held
    model = slow_model()
    _held = submitted(Sampler(model, 16, 128), model)
    in_flight(_held)
    assert _held._rounds


def dropped() -> None:
    model = slow_model()
    in_flight(submitted(Sampler(model, 16, 128), model))


def pending() -> None:
    """Rows are not done: rounds are in flight and a prompt of several chunks is being prefilled."""
    global _held
    model = slow_model(max_position_embeddings=1024)
    _held = Sampler(model, 16, 1024, prefill_tokens=64)
    for length in (4, 900):
        _held.submit([1] * length, 64, eos_token_ids=[])
    for _ in range(6):
        _held.step()


def several_devices() -> None:
    """Each with the whole weights."""
    global _held
    _held = Sampler(over(slow_model(), 2), 8, 128)
    for prompt in PROMPTS[:4]:
        _held.submit(prompt, 64, eos_token_ids=[])
    for _ in range(3):
        _held.step()


def copied() -> None:
    """An array that is copied to the host, as the sampler's are on a GPU."""
    global _held
    from jaxtune.system import lifetimes

    class Owner:
        """Of the copy."""

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 30, lambda _, x: jnp.tanh(x @ x), x)

    x = slow(jnp.ones((1000, 1000)))
    x.copy_to_host_async()
    _held = Owner()
    lifetimes.end_with(_held, jax.block_until_ready, x)


def main(way: str) -> int:
    print("made", flush=True)
    if way == "exit":
        sys.exit(3)
    if way == "error":
        raise ArithmeticError("of the test")
    if way == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    return 0


if __name__ == "__main__":
    {one.__name__: one for one in (generate, held, dropped, pending, several_devices, copied)}[sys.argv[1]]()
    sys.exit(main(sys.argv[2]))
