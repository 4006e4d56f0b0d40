"""What frozen weights and products in few bits cost a fine-tuned model: pairs of equal seeds from one base.

    python benchmarks/train/quality.py --output FILE.json [--arms bf16,bf16_nudged,fp8,fp8_residuals,fp8_blocks,nf4]
                                       [--seeds 3] [--steps 1000] [--seconds 540]

A small decoder (its widths are multiples of 128, so our FP8 kernel runs on Hopper) is pretrained here, on Python's own
source code and on copying, reversing and adding, and saved to a folder. Each arm loads that folder, or what was made of
it in its own format, and trains LoRA on all linears for other text: English, the docstrings of the libraries that
jaxtune needs, and the same tasks in other words. A task that is new to the base (sorting, multiplying) says nothing
here: within 1,000 steps it is caught where it is learnt fastest, and a change of no consequence moves its loss by 1 to
4 %. fp8_residuals is fp8 with gate and up kept in FP8 for the backward. bf16_nudged is bf16 from a start
that is 2^-7 larger: what a change of no consequence makes of a loss, beside which other differences are read. Then the
same from a folder with made outliers: the weights of 0.5 % of each norm's channels times 2^k, the columns of the next
matrices divided by it, which changes no number that the model computes in 16 bits.

Of each run: the loss over held-out English (nats a character), that of rows that were trained on, exact match of the
tasks' answers (greedy: every character is the likeliest after those before it), the adapter scored over the bf16 base
too, and
at steps 1, 100 and the last the cosine by layer of the adapter's gradient with bf16's at the same adapter and batch.
Equal seeds have the same start and batches. FILE.json is written after each run; one that is there is added to, so
that several calls, each of at most --seconds, make one record. The exit status is 1 where runs are missing.

Each arm has a process of its own, which compiles while this one trains the base; then they share the device, which
programs this small would leave idle for much of the time. A run's `seconds` are what it took beside the others.

The base is trained anew by each call, by deterministic programs: to the same weights on one kind of device. Runs from
other weights (`base_digest`) are neither taken for these nor compared with them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the device
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.random_model import in_blocks
from benchmarks.record import environment, write
from jaxtune.models.decoder import Decoder
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import copy_structure, get_peft_model
from jaxtune.models.quant import compute_in_fp8
from jaxtune.models.residual_plan import IN_FP8, KEEP, ResidualPlan
from jaxtune.pallas import dispatch
from jaxtune.train.programs import compiler_options

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WIDTH, LENGTH = 32, 256  # of an example, and of a row, in characters; a token is a character of ASCII, and 0 is padding
# Rows for training: about as many as are drawn in 1,000 steps, else what is measured is what was learnt by heart.
POOL = 32_768
HELD_OUT = 2048  # rows: with few, which ones they are is a per cent of a difference
LIBRARIES = ("numpy", "scipy", "jax", "flax", "optax")
RANK = 16
ARMS = "bf16,bf16_nudged,fp8,fp8_residuals,fp8_blocks,nf4"
NUDGE = 1 + 2**-7  # a unit in the last place of bfloat16
_OWN = ("arms", "bases", "seeds", "seconds")  # options that two calls for one record may differ in


# ---- text


@functools.cache
def source_code() -> str:
    """Python's own, the tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if not {"site-packages", "test", "tests"} & {*path.parts})
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)


def english() -> str:
    """Docstrings, of 200 characters and more, of the libraries; each once."""
    found: dict[str, None] = {}
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        assert spec is not None and spec.origin is not None
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            with warnings.catch_warnings(), contextlib.suppress(SyntaxError, UnicodeDecodeError):
                warnings.simplefilter("ignore")  # what a parser says of others' code
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                        text = ast.get_docstring(node) or ""
                        found |= {text: None} if len(text) >= 200 else {}
    return "\n".join(found)


def rows_of_text(text: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(int32[count, LENGTH], bool of the same shape): pieces of it, drawn without being put back; every place but those
    of characters that are no ASCII.

    Raises:
      ValueError: there are fewer pieces.
    """
    tokens = np.frombuffer(text.encode("ascii", errors="replace"), np.uint8).astype(np.int32)
    pieces = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    if len(pieces) < count:
        raise ValueError(f"{len(pieces)} pieces of {LENGTH} characters, of {count} that are wanted")
    chosen = pieces[np.random.default_rng(seed).permutation(len(pieces))[:count]]
    return chosen, chosen != ord("?")


# ---- tasks

TASKS = ("copy", "reverse", "add")


def example(task: str, draw: np.random.Generator, in_words: bool) -> tuple[str, str]:
    """(what is asked, the answer)"""
    if task == "add":
        a, b = draw.integers(10, 1000, 2)
        return (f"sum {a} {b} -> " if in_words else f"{a}+{b}="), str(a + b)
    text = "".join(LETTERS[i] for i in draw.integers(0, 26, draw.integers(4, 10)))
    answer = text if task == "copy" else text[::-1]
    return (f"{task} {text} -> " if in_words else f"{task[0]}:{text}="), answer


def rows_of_tasks(count: int, seed: int, in_words: bool) -> tuple[np.ndarray, np.ndarray]:
    """(int32[count, LENGTH], bool of the same shape): examples side by side, and the places of their answers."""
    draw = np.random.default_rng(seed)
    tokens = np.zeros((count * LENGTH // WIDTH, WIDTH), np.int32)
    answers = np.zeros(tokens.shape, bool)
    for row, answer in zip(tokens, answers, strict=True):
        asked, wanted = example(TASKS[draw.integers(len(TASKS))], draw, in_words)
        text = asked + wanted + "\n"
        row[: len(text)] = [ord(character) for character in text]
        answer[len(asked) : len(text)] = True
    return tokens.reshape(count, LENGTH), answers.reshape(count, LENGTH)


def both(one, other) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two kinds; a batch is drawn at random, so their order is of no matter."""
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])


# ---- models


def config(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": hidden,
        "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64, "max_position_embeddings": LENGTH, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True, "initializer_range": 0.02,
        "bos_token_id": None, "eos_token_id": 10, "pad_token_id": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip


def with_outliers(model: Decoder, k: int) -> Decoder:
    """The same function: 0.5 % of each norm's channels, three at least, 2^k times larger, and what they multiply as
    much smaller."""
    model = copy_structure(model)
    for number, layer in enumerate(model.layers):
        for part, names in (("mixer", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            weight = getattr(layer, f"{part}_norm").weight
            count = max(3, weight.shape[0] // 200)
            chosen = np.random.default_rng(number).choice(weight.shape[0], count, replace=False)
            weight[...] = weight[...].at[chosen].multiply(2.0**k)
            for name in names:
                linear = getattr(getattr(layer, part), name).weight
                linear[...] = linear[...].at[:, chosen].multiply(2.0**-k)
    return model


def arms_of(folder: Path) -> dict[str, Any]:
    """{arm: a function that gives its model}, all from this folder."""
    load = functools.partial(from_pretrained, dtype="bfloat16")

    def official():
        """A checkpoint in 128 x 128, written and read."""
        made = folder.with_name(folder.name + "_blocks")
        if not made.exists():
            save_pretrained(in_blocks(load(folder)[0]), made)
        return compute_in_fp8(load(made)[0])

    return {
        "bf16": lambda: load(folder)[0],
        "bf16_nudged": lambda: load(folder)[0],
        "fp8": lambda: compute_in_fp8(load(folder, load_in="fp8")[0]),
        "fp8_residuals": lambda: compute_in_fp8(load(folder, load_in="fp8")[0]),
        "fp8_blocks": official,
        "fp8_decoded": lambda: load(folder, load_in="fp8")[0],
        "nf4": lambda: load(folder, load_in="nf4")[0],
    }


# ---- training


def losses(program, trainable, frozen, tokens, answers):
    """(float32[B, T - 1] of each character of an answer, 0 elsewhere; whether the likeliest is right)

    program: (graph, LayerPlan)."""
    graph, plan = program
    model = nnx.merge(graph, trainable, frozen)
    plan = ResidualPlan.uniform(plan, len(model.layers))
    logits = model.logits(model.hidden_states(tokens, plan=plan))[:, :-1]
    targets, counted = tokens[:, 1:], answers[:, 1:]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.where(counted, each, 0.0), logits.argmax(-1) == targets


def mean_loss(trainable, program, frozen, tokens, answers):
    return losses(program, trainable, frozen, tokens, answers)[0].sum() / answers[:, 1:].sum()


def loss_of_masters(trainable, *rest):
    """mean_loss in bfloat16 of trained weights in float32."""
    return mean_loss(jax.tree.map(lambda a: a.astype(jnp.bfloat16), trainable), *rest)


OPTIONS = compiler_options(jax.default_backend(), deterministic=False)  # of a run's own programs
gradient = jax.jit(jax.grad(mean_loss), static_argnums=1, compiler_options=OPTIONS)


def optimizer(rate: float, steps: int, warm_up: int = 0) -> optax.GradientTransformation:
    falling = optax.linear_schedule(rate, 0.0, steps - warm_up)
    schedule = optax.join_schedules([optax.linear_schedule(0.0, rate, warm_up), falling], [warm_up])
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))


def train_steps(loss, change, program, rows: int, trainable, state, frozen, pool, key, first, last):
    """(trainable, state of the optimizer) after the steps first to last - 1; a batch is drawn by its step's number.

    loss: mean_loss, or loss_of_masters. change: the optimizer."""

    def step(number, carry):
        trainable, state = carry
        chosen = batch_of(pool, key, number, rows)
        updates, state = change.update(jax.grad(loss)(trainable, program, frozen, *chosen), state, trainable)
        return optax.apply_updates(trainable, updates), state

    return jax.lax.fori_loop(first, last, step, (trainable, state))


def _compiled_training(options: dict[str, Any]):
    return jax.jit(train_steps, static_argnums=(0, 1, 2, 3), donate_argnums=(4, 5), compiler_options=options)


train = _compiled_training(OPTIONS)
pretrain = _compiled_training(compiler_options(jax.default_backend(), deterministic=True))


def batch_of(pool, key, number, rows: int):
    chosen = jax.random.randint(jax.random.fold_in(key, number), (rows,), 0, len(pool[0]))
    return tuple(each[chosen] for each in pool)


@functools.partial(jax.jit, static_argnums=0, compiler_options=OPTIONS)
def scores(program, trainable, frozen, tokens, answers):
    """(mean loss, exact match)"""
    each, right = losses(program, trainable, frozen, tokens, answers)
    wrong = (answers[:, 1:] & ~right).astype(jnp.int32)
    wrong = jnp.pad(wrong, ((0, 0), (1, 0))).reshape(-1, WIDTH).max(-1)
    return each.sum() / answers[:, 1:].sum(), 1.0 - wrong.mean()


def cosines(one, other) -> list[float]:
    """By layer, in order."""
    layers: dict[int, list[tuple]] = {}
    for (path, a), (_, b) in zip(nnx.to_flat_state(one), nnx.to_flat_state(other), strict=True):
        layers.setdefault(path[1], []).append((a.get_value().ravel(), b.get_value().ravel()))
    found = []
    for number in sorted(layers):
        a, b = (jnp.concatenate(each) for each in zip(*layers[number], strict=True))
        found.append(float(a @ b / jnp.maximum(jnp.linalg.norm(a) * jnp.linalg.norm(b), 1e-30)))
    return found


def pretrained(options, folder: Path) -> dict[str, Any]:
    """Trains the base, its weights in float32 and computing in bfloat16, and saves it in bfloat16; its scores, and a
    digest of its weights."""
    model = model_from_config(config(options.hidden, options.layers), jax.random.key(0), "bfloat16")
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    trainable = jax.tree.map(lambda a: a.astype(jnp.float32), trainable)
    half = max(POOL // options.scale // 2, 1)
    pool = jax.device_put(both(rows_of_text(source_code(), half, 1), rows_of_tasks(half, 1, in_words=False)))
    steps = options.pretrain_steps
    change = optimizer(1e-3, steps, warm_up=steps // 20)
    program = (graph, KEEP)
    arguments = (loss_of_masters, change, program, options.rows, trainable, change.init(trainable), frozen)
    trainable, _ = pretrain(*arguments, pool, jax.random.key(1), 0, steps)
    trainable = jax.tree.map(lambda a: a.astype(jnp.bfloat16), trainable)
    rows = jax.device_put(rows_of_tasks(max(256 // options.scale, 1), 2, in_words=False))
    loss, exact = scores(program, trainable, frozen, *rows)
    save_pretrained(nnx.merge(graph, trainable, frozen), folder)
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trainable):
        digest.update(np.asarray(leaf).tobytes())
    return {"loss": float(loss), "exact_match": float(exact), "digest": digest.hexdigest()[:16]}


def adapted(arm: str, model: Decoder, seed: int):
    """((graph, LayerPlan), trainable, frozen)"""
    graph, trainable, frozen = nnx.split(get_peft_model(model, r=RANK, lora_alpha=RANK, seed=seed), nnx.Param, ...)
    if arm == "bf16_nudged":
        trainable = jax.tree.map(lambda a: a * jnp.asarray(NUDGE, a.dtype), trainable)
    return (graph, IN_FP8 if arm == "fp8_residuals" else KEEP), trainable, frozen


@dataclass(frozen=True)
class Programs:
    """An arm's, compiled for any seed and base."""

    gradient: Callable
    scores: Callable
    train: Callable


def compiled(options, change, arm: str, model: Decoder, base: Decoder, pool, held_out) -> tuple[Programs, Programs]:
    """What `run` runs of an arm, and of bf16; all side by side."""

    def lowered(arm, model):
        program, trainable, frozen = adapted(arm, model, 0)
        batch = jax.eval_shape(lambda pool: batch_of(pool, jax.random.key(0), 0, options.rows), pool)
        yield gradient.lower(trainable, program, frozen, *batch)
        yield scores.lower(program, trainable, frozen, *held_out)
        state = jax.eval_shape(change.init, trainable)
        steps = (mean_loss, change, program, options.rows, trainable, state, frozen, pool, jax.random.key(0), 0, 1)
        yield train.lower(*steps)

    with ThreadPoolExecutor() as threads:
        own = [threads.submit(each.compile) for each in lowered(arm, model)]
        plain = own
        if arm not in ("bf16", "bf16_nudged"):  # its training is nobody's
            few = itertools.islice(lowered("bf16", base), 2)
            plain = [*(threads.submit(each.compile) for each in few), own[2]]
        made = [Programs(*(each.result() for each in futures)) for futures in (own, plain)]
    return made[0], made[1]


def run(
    options,
    change,
    programs: tuple[Programs, Programs],
    arm: str,
    model: Decoder,
    base: Decoder,
    seed: int,
    pool,
    held_out,
    asked,
) -> dict[str, Any]:
    """One fine-tuning of an arm's model by an optimizer, scored over itself and over `base`, which is in bfloat16.

    held_out: rows of English. asked: of tasks."""
    (_, trainable, frozen), (*_, of_plain) = adapted(arm, model, seed), adapted("bf16", base, seed)
    own, plain = programs
    state = change.init(trainable)
    key, before, found = jax.random.key(seed), 0, {}
    began = time.perf_counter()
    for stop in sorted({min(stop, options.steps) for stop in (1, 100, options.steps)}):
        trainable, state = own.train(trainable, state, frozen, pool, key, before, stop)
        batch = batch_of(pool, key, stop, options.rows)
        ours, theirs = own.gradient(trainable, frozen, *batch), plain.gradient(trainable, of_plain, *batch)
        found[stop], before = cosines(ours, theirs), stop
    loss, _ = own.scores(trainable, frozen, *held_out)
    other_loss, _ = plain.scores(trainable, of_plain, *held_out)
    _, exact = own.scores(trainable, frozen, *asked)
    _, other_exact = plain.scores(trainable, of_plain, *asked)
    seen, _ = own.scores(trainable, frozen, *(each[: len(held_out[0])] for each in pool))
    return {
        "loss": float(loss), "exact_match": float(exact), "loss_of_training_rows": float(seen),
        "loss_over_bf16_base": float(other_loss),
        "exact_match_over_bf16_base": float(other_exact), "gradient_cosines": found,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """By base and arm: means over seeds, and the loss beside bf16's of the same weights and seed, relative; spread: the
    standard deviation of bf16's losses over seeds, relative."""
    found = {}
    for base, arm in dict.fromkeys((run["base"], run["arm"]) for run in runs):
        ours, plain = (
            {(run["base_digest"], run["seed"]): run for run in runs if (run["base"], run["arm"]) == (base, name)}
            for name in (arm, "bf16")
        )
        pairs = [ours[key]["loss"] / plain[key]["loss"] - 1 for key in ours if key in plain]
        of_plain = [run["loss"] for run in plain.values()]
        found[f"{base}, {arm}"] = {
            "loss": statistics.mean(run["loss"] for run in ours.values()),
            "exact_match": statistics.mean(run["exact_match"] for run in ours.values()),
            "loss_over_bf16": statistics.mean(pairs) if pairs else None,
            "each": pairs,
            "spread": statistics.stdev(of_plain) / statistics.mean(of_plain) if len(of_plain) > 1 else None,
            "least_cosine": min(c for run in ours.values() for each in run["gradient_cosines"].values() for c in each),
        }
    return found


def begin(options) -> dict[str, Any]:
    """The record in --output, if its runs were made alike, or a new one.

    Raises:
      SystemExit: the file is of another commit or device, or of other options.
    """
    asked = {name: value for name, value in vars(options).items() if name != "output"}  # no record names a folder
    record = {"benchmark": "train/quality", **environment(), "options": asked, "pretrained": {}, "runs": []}
    output = Path(options.output)
    if not output.is_file():
        return record
    found = json.loads(output.read_text(encoding="utf-8"))
    for key in ("device", "commit"):
        if found[key] != record[key]:
            raise SystemExit(f"--output {output}: {key} is {found[key]!r} there and {record[key]!r} here")
    for name, value in asked.items():
        if name not in _OWN and found["options"][name] != value:
            raise SystemExit(f"--{name.replace('_', '-')} {value}: {output} holds runs of {found['options'][name]}")
    return found | {"options": asked}


# ---- processes

_POOLS, _START = "pools.npz", "start.json"  # in the folder of a call; the latter is there last


def runs_of(options, arm: str, folder: Path) -> Iterator[dict[str, Any]]:
    """An arm's runs, as they are made. They begin once the folder has been filled; its _START says which are wanted,
    as [seed, base], and the time after which none may go on."""
    parent = os.getppid()
    sizes = (max(rows // options.scale, 2) for rows in (POOL, HELD_OUT))
    kinds = (jnp.int32, jnp.bool_)
    pool, held_out = (tuple(jax.ShapeDtypeStruct((rows, LENGTH), kind) for kind in kinds) for rows in sizes)
    change = optimizer(options.rate, options.steps)
    with tempfile.TemporaryDirectory() as alike:  # a base of the same shapes: what is compiled depends on no more
        model = model_from_config(config(options.hidden, options.layers), jax.random.key(0), "bfloat16")
        save_pretrained(model, Path(alike) / "base")
        make = arms_of(Path(alike) / "base")
        programs = compiled(options, change, arm, make[arm](), make["bf16"](), pool, held_out)
    print(f"{arm}: compiled", file=sys.stderr, flush=True)
    while not (folder / _START).exists():
        if os.getppid() != parent:
            return
        time.sleep(0.1)
    start = json.loads((folder / _START).read_text(encoding="utf-8"))
    with np.load(folder / _POOLS) as pools:
        rows = [jax.device_put((pools[name], pools[f"{name}_answers"])) for name in ("pool", "held_out", "asked")]
    models: dict[str, list[Decoder]] = {}
    longest = 0.0
    for seed, base in start["wanted"][arm]:
        begun = time.time()
        if begun + longest > start["end"]:
            return
        if base not in models:
            models[base] = [arms_of(folder / base)[each]() for each in (arm, "bf16")]
        found = run(options, change, programs, arm, *models[base], seed, *rows)
        longest = max(longest, time.time() - begun)
        own = {"base": base, "arm": arm, "seed": seed, "base_digest": start["digest"]}
        yield own | found | {"fp8_matmul": dispatch.record.get("fp8_matmul")}


def prepare(options, folder: Path) -> dict[str, Any]:
    """Fills a folder with the bases, and with the rows to train on and held out; returns `pretrained`'s."""

    def make_pools():
        named = {}
        pool, held_out = (max(rows // options.scale, 2) for rows in (POOL, HELD_OUT))
        text = rows_of_text(english(), pool // 2 + held_out, 3)
        learnt, kept = ([each[part] for each in text] for part in (slice(held_out, None), slice(held_out)))
        for name, rows in (
            ("pool", both(learnt, rows_of_tasks(pool - pool // 2, 3, in_words=True))),
            ("held_out", kept),
            ("asked", rows_of_tasks(held_out, 4, in_words=True)),
        ):
            named[name], named[f"{name}_answers"] = rows
        np.savez(folder / _POOLS, **named)

    with ThreadPoolExecutor(1) as threads:  # while XLA compiles, which needs no Python
        pools = threads.submit(make_pools)
        scored = pretrained(options, folder / "plain")
        save_pretrained(with_outliers(from_pretrained(folder / "plain")[0], options.outliers), folder / "outliers")
        pools.result()
    return scored


class Record:
    """What --output holds."""

    def __init__(self, options):
        self.output, self.found = options.output, begin(options)
        self._lock = threading.Lock()
        self._wanted = list(itertools.product(range(options.seeds), options.bases.split(",")))

    def missing(self, arm: str, digest: str | None) -> list[tuple[int, str]]:
        """[(seed, base)] of the runs that an arm lacks from these weights. Seeds first: what is there when the time is
        up is pairs."""
        runs = [run for run in self.found["runs"] if (run["base_digest"], run["arm"]) == (digest, arm)]
        done = {(run["seed"], run["base"]) for run in runs}
        return [each for each in self._wanted if each not in done]

    def add(self, run: dict[str, Any]) -> None:
        with self._lock:
            used = run.pop("fp8_matmul")
            self.found["runs"].append(run)
            self.found["summary"] = summary(self.found["runs"])
            self.found["fp8_matmul"] = used or self.found.get("fp8_matmul")
            write(self.output, self.found)
        shown = {name: round(value, 4) for name, value in run.items() if isinstance(value, float)}
        print(run["base"], run["arm"], run["seed"], shown, flush=True)


class Processes:
    """One of this script for each arm, whose runs a record gets. Those that are left at the end are ended."""

    def __init__(self, record: Record, folder: Path):
        self._record, self._folder = record, folder
        self._started: dict[str, tuple[subprocess.Popen, threading.Thread]] = {}

    def start(self, arms: list[str]) -> None:
        for arm in arms:
            if arm not in self._started:
                command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm, "--folder", str(self._folder)]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                thread = threading.Thread(target=self._listen, args=(process,))
                thread.start()
                self._started[arm] = process, thread

    def _listen(self, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # else a library's own words
                self._record.add(json.loads(line))

    def wait(self) -> None:
        for process, thread in self._started.values():
            process.wait()
            thread.join()

    def end(self) -> None:
        for process, _ in self._started.values():
            process.kill()
        self.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--arms", default=ARMS, help="by commas; fp8_decoded: no product in FP8")
    parser.add_argument("--bases", default="plain,outliers", help="by commas")
    parser.add_argument("--outliers", type=int, default=6, help="k: made outliers are 2^k times larger")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pretrain-steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32, help=f"of a step, each of {LENGTH} tokens")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--scale", type=int, default=1, help="divide the pools of rows by this, to try the script")
    parser.add_argument("--seconds", type=float, default=540, help="that this call may take")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # of a process that another one started
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        for found in runs_of(options, options.arm, Path(options.folder)):
            print(json.dumps(found), flush=True)
        return 0
    for name in ("arm", "folder"):
        delattr(options, name)  # the record has the others
    began, record, arms = time.time(), Record(options), options.arms.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = Processes(record, folder)
        try:
            likely = next(reversed(record.found["pretrained"]), None)  # the weights of the call before
            processes.start([arm for arm in arms if record.missing(arm, likely)])
            scored = prepare(options, folder)
            digest = scored["digest"]
            record.found["pretrained"][digest] = scored
            print(f"pretrained in {time.time() - began:.0f} s: {scored}", flush=True)
            wanted = {arm: record.missing(arm, digest) for arm in arms}
            start = {"digest": digest, "wanted": wanted, "end": began + options.seconds}
            (folder / "start").write_text(json.dumps(start), encoding="utf-8")
            (folder / "start").replace(folder / _START)
            processes.start([arm for arm in arms if wanted[arm]])
            processes.wait()
        finally:
            processes.end()
    print(json.dumps(record.found.get("summary"), indent=1))
    print(f"{time.time() - began:.0f} s in all; products in FP8: {record.found.get('fp8_matmul')}")
    missing = sum(len(record.missing(arm, digest)) for arm in arms)
    if missing:
        print(f"{missing} runs are missing; the same command goes on from here", flush=True)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
