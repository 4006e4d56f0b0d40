"""What is trained for the record: every kind of layer, every way in which a step can be run, on tiny models on a CPU.

Each case is a run of 20 steps of the real Trainer, under one or more plans of residuals. Recorded are the losses, the
gradient of every tensor in step 1 before clipping, and every trained tensor after the last step.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import tempfile

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from tiny import CONFIGS

from jaxtune.train.config import DataConfig, EvaluationConfig, MemoryConfig, MeshConfig, OptimConfig, QatConfig
from tests.golden import engine
from tests.golden.records import described
from tests.train.tiny_runs import dataset, documents, make_config

STEPS, LENGTH = 20, 32  # past every window and every original context of the configs

OFFLOAD = "offload"
MIXED = (
    "0: recompute, layer_input=offload, attention_out=keep, lse=keep; 1: query=recompute, gate=recompute, up=offload"
)
MIXED_EXPERTS = "0: recompute, layer_input=offload, attention_out=keep, lse=keep; 1: query=recompute"

# Families whose layers differ from others' in more than a config says: all but llama_yarn, qwen2, mistral and smollm3.
# Two layers of each, one of each kind where it has two.
_TWO_LAYERS = {
    "qwen3": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma3": {"sliding_window_pattern": 2},
    "gemma4": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}
# Momentum and no clipping, which is where a wrong scale of the gradients shows.
SGD = OptimConfig(name="sgd", learning_rate=0.05)
ADAMW = OptimConfig(learning_rate=3e-3, weight_decay=0.1)
ADAM8 = OptimConfig(name="adamw_8bit", learning_rate=3e-3, weight_decay=0.1, weights="bf16")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclasses.dataclass(frozen=True)
class Case:
    """family: of tiny.CONFIGS. plans: memory.plan of each run. load_in, adapter: as in a config (None: all trains).
    packing, documents: whether rows hold several documents, and the longest one (None: every row is one, and full).
    settings: of the TrainConfig. rounds: whether it rounds to fewer bits than those of float32."""

    family: str
    plans: tuple[str, ...] = ("keep",)
    load_in: str | None = None
    adapter: dict | None = None
    packing: bool = True
    longest: int | None = LENGTH
    settings: dict = dataclasses.field(default_factory=dict)
    rounds: bool = False


_ALL_PLANS = ("keep", "recompute", OFFLOAD, MIXED)
_OF_EXPERTS = ("keep", "recompute", OFFLOAD, MIXED_EXPERTS)
_ADAMW = dict(optim=ADAMW, max_grad_norm=1.0)
_ROUTERS = dict(router_aux_loss_coef=0.05, router_z_loss_coef=0.01)

CASES = {
    "llama": Case("llama", (*_ALL_PLANS, "recompute; tile=8")),
    "qwen3": Case("qwen3"),
    "gemma2": Case("gemma2", ("keep", MIXED)),
    "gemma3": Case("gemma3"),
    "gemma4": Case("gemma4", ("keep", "recompute", MIXED)),
    "phi3": Case("phi3"),
    "olmo2": Case("olmo2"),
    "mixtral": Case("mixtral"),
    "qwen3_moe": Case("qwen3_moe", _OF_EXPERTS, settings=dict(micro_batches=2, **_ROUTERS)),
    "gpt_oss": Case("gpt_oss", _OF_EXPERTS),
    "gpt_oss, adapters on experts, losses of routers": Case(
        "gpt_oss", ("keep", "recompute"), adapter=dict(r=4, target_parameters=EXPERTS), settings=_ROUTERS | _ADAMW
    ),
    "gpt_oss, experts in NF4": Case("gpt_oss", load_in="nf4", adapter=dict(r=4, target_parameters=EXPERTS)),
    "llama, NF4 and adapters": Case("llama", _ALL_PLANS, load_in="nf4", adapter=dict(r=4, lora_alpha=8)),
    "llama, adapters with dropout in micro-batches": Case(
        "llama", ("keep", "recompute"), adapter=dict(r=4, lora_dropout=0.2), settings=dict(micro_batches=2)
    ),
    "mistral, DoRA with dropout, the head whole": Case(
        "mistral",
        adapter=dict(r=4, use_dora=True, lora_dropout=0.1, modules_to_save=("lm_head",), use_rslora=True),
        settings=_ADAMW,
    ),
    "gemma2, tied embedding whole": Case("gemma2", adapter=dict(r=4, modules_to_save=("embed_tokens",))),
    "llama, AdamW in micro-batches": Case("llama", settings=dict(micro_batches=4, **_ADAMW)),
    "llama, 8-bit AdamW over bf16 weights": Case(
        "llama", ("keep", "recompute"), settings=dict(optim=ADAM8, max_grad_norm=1.0), rounds=True
    ),
    "llama, 8-bit AdamW on the host": Case(
        "llama",
        settings=dict(optim=dataclasses.replace(ADAM8, offload=True), max_grad_norm=1.0, micro_batches=2),
        rounds=True,
    ),
    "llama, 8-bit AdamW without a bound": Case("llama", settings=dict(optim=ADAM8), rounds=True),
    "llama, Adafactor": Case("llama", settings=dict(optim=OptimConfig(name="adafactor", learning_rate=1e-2))),
    "llama, one document a row": Case("llama", packing=False),
    "llama, full rows": Case("llama", longest=None),
    "llama, evaluation": Case("llama", settings=dict(evaluation=EvaluationConfig(every_steps=10, at_start=True))),
    "qwen3_moe, two devices": Case("qwen3_moe", settings=dict(mesh=MeshConfig(data=2), **_ROUTERS)),
    "llama, NF4 and adapters in bf16": Case(
        "llama", ("keep",), "nf4", dict(r=4, lora_alpha=8), settings=dict(precision="bf16", **_ADAMW), rounds=True
    ),
    "gemma2, fp16": Case("gemma2", settings=dict(precision="fp16", **_ADAMW), rounds=True),
    "llama, QAT after two steps": Case(
        "llama",
        adapter=dict(r=4),
        settings=dict(qat=QatConfig(group_size=32, start=2), micro_batches=2),
        rounds=True,
    ),
}


def config_of(family: str) -> dict:
    return CONFIGS[family] | {"num_hidden_layers": 2} | _TWO_LAYERS.get(family, {})


def _rows(case: Case, seed: int, count: int):
    made = documents(count, seed, case.longest or LENGTH)
    if case.longest is None:
        made = [document for document in documents(40 * count, seed, LENGTH) if len(document.tokens) == LENGTH]
    return dataset(made, LENGTH, case.packing)


def run(name: str, plan: str) -> engine.Run:
    case = CASES[name]
    settings = dict(optim=SGD, max_grad_norm=None, steps=STEPS) | case.settings
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            f"{folder}/out",
            data=DataConfig(
                train="made here",
                eval="made here too" if "evaluation" in case.settings else None,
                length=LENGTH,
                packing=case.packing,
            ),
            memory=MemoryConfig(plan=plan),
            **settings,
        )
        held_out = _rows(case, 2, 8) if "evaluation" in case.settings else None
        model = engine.make_model(config_of(case.family), case.load_in, case.adapter)
        return engine.train(model, config, _rows(case, 1, 40), held_out)


def record(name: str) -> dict[str, dict | str]:
    """{plan: what its run gave, or the name of an earlier plan that gave the same}"""
    found: dict[str, dict | str] = {}
    for plan in CASES[name].plans:
        done = run(name, plan)
        losses = [line[key] for line in done.history for key in ("loss", "eval_loss") if key in line]
        entry = {
            "losses": [float(f"{loss:.9g}") for loss in losses],
            "tensors": {
                name: [described(done.gradients[name]), described(array)]
                for name, array in sorted(done.weights.items())
            },
        }
        found[plan] = next((other for other, given in found.items() if given == entry), entry)
    return found


# ---- whether this machine computes as that of the record


@functools.cache
def steps_of_a_layer() -> jax.Array:
    """The weights of an attention layer, an MLP and a vocabulary after four steps of Adam, written without the engine.

    Two processors can agree in each operation alone and still give runs other bits: libraries choose the order of sums
    by the sizes of caches, and compilers by what surrounds an operation.
    """
    draw = np.random.default_rng(6)
    hidden, heads, vocab, rows = 64, 4, 384, 4
    shapes = dict(embed=(vocab, hidden), qkv=(hidden, 3 * hidden), out=(hidden, hidden))
    shapes |= dict(up=(hidden, 160), down=(160, hidden))
    weights = {name: jnp.asarray(0.1 * draw.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    tokens = jnp.asarray(draw.integers(0, vocab, (rows, LENGTH)))
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))

    def norm(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)

    def rotated(x):
        angles = jnp.arange(LENGTH)[:, None] / 100.0 ** (jnp.arange(8) / 8.0)
        cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def loss(w, tokens, seen):
        x = w["embed"][tokens]
        q, k, v = jnp.moveaxis((norm(x) @ w["qkv"]).reshape(rows, LENGTH, 3, heads, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / 4.0
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)
        x = x + mixed.reshape(rows, LENGTH, hidden) @ w["out"]
        x = x + jax.nn.silu(norm(x) @ w["up"]) @ w["down"]
        logits = norm(x) @ w["embed"].T
        chosen = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits[:, :-1], axis=-1) - chosen).mean()

    @jax.jit
    def step(state, tokens, seen):
        w, first, second = state
        gradients = jax.grad(loss)(w, tokens, seen)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, second, gradients)
        return jax.tree.map(lambda a, m, s: a - 0.01 * m / (jnp.sqrt(s) + 1e-8), w, first, second), first, second

    state = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)))
    for _ in range(4):
        state = step(state, tokens, seen)
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(state[0])])


def calibration() -> dict[str, str]:
    """{operation: digest of its result}: of operations of which the runs consist. Where these differ between two
    machines or versions, bits of whole runs cannot be compared."""
    draw = np.random.default_rng(5)
    # Arguments, as a compiler would compute with constants beforehand, by code of its own.
    a, b = (jnp.asarray(draw.standard_normal(shape, np.float32)) for shape in ((64, 96), (96, 160)))
    operations = {
        "product": lambda a, b: a @ b,
        "product of bf16": lambda a, b: (a.astype("bfloat16") @ b.astype("bfloat16")).astype("float32"),
        "batched product": lambda a, b: jnp.einsum("bij,bkj->bik", a.reshape(4, 16, 96), a.reshape(4, 16, 96)),
        "sum": lambda a, b: a.sum(0),
        "softmax": lambda a, b: jax.nn.softmax(a),
        "elementwise": lambda a, b: jnp.tanh(a) * jax.nn.silu(a) + jax.lax.rsqrt(jnp.abs(a) + 1),
        "rotation": lambda a, b: jnp.stack([jnp.cos(100 * a), jnp.sin(100 * a)]),
        "norm and its gradient": lambda a, b: jax.grad(
            lambda x: ((x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)) @ b).std()
        )(a),
        "random numbers": lambda a, b: jax.random.normal(jax.random.key(3), (64, 32)),
    }
    made = {name: np.asarray(jax.jit(operation)(a, b)) for name, operation in operations.items()}
    made["steps of a layer"] = np.asarray(steps_of_a_layer())
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest()[:12] for name, array in made.items()}
    return digests | {"jaxlib": jaxlib.__version__}
