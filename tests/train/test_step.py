"""The train step: one gradient however the rows are split, the optimizers, fp16, and what happens to bad numbers."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval
from tiny_models import tiny_config, tiny_model

from jaxtune.models.config import PRE_AND_POST_NORM, LayerSpec, MoEConfig
from jaxtune.models.decoder import Decoder, noised
from jaxtune.models.lora import get_peft_model
from jaxtune.pallas.attention import packed_layout
from jaxtune.train.config import DataConfig, MeshConfig, OptimConfig, ScheduleConfig
from jaxtune.train.config.sections import OPTIMIZERS
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.packing.packing import pack
from jaxtune.train.data.tokens.documents import Document
from jaxtune.train.engine.trained_model import trainable_names
from jaxtune.train.objectives.loss import Forward, loss_sums
from jaxtune.train.optimizer.optim import make_optimizer, update_bound
from jaxtune.train.optimizer.schedule import learning_rate_schedule
from jaxtune.train.program.step import StepProgram, Sums
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import LENGTH, dataset, documents, lora_model, make_config

# ---- accumulation

DOCUMENTS = documents(7, seed=6)  # of 8 rows one is left empty


@pytest.fixture(scope="module")
def split_run(tmp_path_factory):
    """run(**changes) -> (losses, gradient norms, targets) of two steps over the same seven documents."""
    model = lora_model(modules_to_save=["lm_head"])

    def run(packing=False, rows=8, **changes):
        data = dataset(DOCUMENTS, packing=packing)
        assert -(-len(data.rows) // rows) == 1, "a step must see every document"
        data_config = DataConfig(train="rows", length=LENGTH, packing=packing)
        config = make_config(tmp_path_factory.mktemp("run"), steps=2, rows_per_step=rows, data=data_config, **changes)
        trainer = Trainer(model, None, config, train_rows=data)
        trainer.train()
        return tuple(np.asarray([line[key] for line in trainer.history]) for key in ("loss", "grad_norm", "targets"))

    return run


@pytest.fixture(scope="module")
def whole(split_run):
    return split_run(micro_batches=1)


@pytest.mark.parametrize(
    "changes",
    [
        dict(micro_batches=8),
        dict(packing=True, rows=4, micro_batches=2),
        dict(mesh=MeshConfig(data=2), micro_batches=2),
        dict(mesh=MeshConfig(data=8)),
    ],
    ids=["8 x 1", "packed", "2 devices", "8 devices"],
)
def test_one_gradient_however_the_rows_are_split(split_run, whole, changes):
    loss, norm, targets = split_run(**changes)
    np.testing.assert_array_equal(targets, whole[2])
    assert targets[0] == sum(int(d.mask[1:].sum()) for d in DOCUMENTS)
    np.testing.assert_allclose(loss, whole[0], rtol=1e-6)
    np.testing.assert_allclose(norm, whole[1], rtol=1e-5)


def test_the_rows_are_uneven():
    """What the test above stands on: devices and micro-batches with different target counts, one with none."""
    counts = dataset(DOCUMENTS, packing=False).batches(8).batch_at(0).weights.sum(1)
    assert counts[7] == 0 and len(set(counts.tolist())) > 4


# ---- the program around a model


@pytest.fixture(scope="module")
def parts():
    """(StepProgram of a model with dropout, trainable, frozen, a batch), and its jitted accumulate and update."""
    model = lora_model(lora_dropout=0.2, use_dora=True)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    program = StepProgram(graph, optax.adam(1e-2), lambda step: 1e-2, dropout=True)
    batch = jax.tree.map(lambda a: jnp.asarray(a[:2]), pack(DOCUMENTS, LENGTH)[0])
    accumulate, update = jax.jit(program.accumulate), jax.jit(program.update)
    return program, trainable, frozen, batch, accumulate, update


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_poisoned_batch_is_skipped_on_the_device(parts, micro_batches):
    """The next step has nothing of it: its sums are zeros, or are not read where it has one micro-batch."""
    program, trainable, frozen, batch, accumulate, update = parts
    if micro_batches > 1:
        program = dataclasses.replace(program, micro_batches=micro_batches)
        accumulate, update = jax.jit(program.accumulate), jax.jit(program.update)
    state = program.init(trainable, seed=0)
    zero = program.zero_sums(trainable)
    poisoned = dataclasses.replace(batch, weights=batch.weights.at[0, 3].set(jnp.nan))

    def step(state, sums, batch):
        return update(state, accumulate(sums, state, frozen, batch, jnp.int32(0)))

    state, sums, metrics = step(state, zero, batch)
    assert metrics["finite"] and (int(state.step), int(state.skipped)) == (1, 0)
    before = bits((state.trainable, state.opt_state))
    for count in (1, 2):
        state, sums, metrics = step(state, sums, poisoned)
        assert not metrics["finite"] and not np.isfinite(metrics["loss"])
        assert bits((state.trainable, state.opt_state)) == before
        assert int(metrics["skipped"]) == int(state.skipped) == int(state.skipped_in_row) == count
        assert int(state.step) == 1 + count
        if micro_batches > 1:
            assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(sums)), "the sums were not cleaned"
    expected = bits(accumulate(program.zero_sums(trainable), state, frozen, batch, jnp.int32(0)))
    assert bits(accumulate(sums, state, frozen, batch, jnp.int32(0))) == expected
    state, sums, metrics = step(state, sums, batch)
    assert metrics["finite"] and bits((state.trainable, state.opt_state)) != before
    assert (int(state.skipped), int(state.skipped_in_row), int(state.step)) == (2, 0, 4)
    assert int(state.opt_state[0].count) == 2  # updates made


def test_a_promise_that_rows_are_full_changes_nothing(parts):
    program, trainable, frozen, *_ = parts
    whole = pack([Document(np.arange(LENGTH, dtype=np.int32) % 40, np.ones(LENGTH, bool))] * 2, LENGTH)[0]
    state, sums = program.init(trainable, seed=0), program.zero_sums(trainable)
    got, want = (
        jax.jit(dataclasses.replace(program, full=full).accumulate)(sums, state, frozen, whole, jnp.int32(0))
        for full in (True, False)
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert int(want.count) == 2 * (LENGTH - 1)


@pytest.mark.full
def test_dropout_masks_follow_step_and_micro_batch(parts):
    program, trainable, frozen, batch, accumulate, _ = parts
    trainable = jax.tree.map(lambda a: a + 0.1, trainable)  # B is not zero: masks show
    state = program.init(trainable, seed=0)

    def loss(step=0, micro_batch=0, seed=0):
        state = dataclasses.replace(program.init(trainable, seed=seed), step=jnp.int32(step))
        return float(accumulate(program.zero_sums(trainable), state, frozen, batch, jnp.int32(micro_batch)).loss)

    assert loss() == loss()
    assert len({loss(), loss(step=1), loss(micro_batch=1), loss(seed=1)}) == 4
    plain = program.evaluate(state.trainable, frozen, batch)
    assert float(plain[0]) != loss() and float(plain[1]) == float(batch.weights.sum())


@pytest.mark.full
def test_noise_on_embeddings_follows_the_step_and_the_documents(parts):
    """Uniform within alpha / sqrt(a document's tokens x hidden), other in each step and micro-batch; no evaluation has
    any, nor the reference."""
    program, trainable, frozen, batch, *_ = parts
    noisy = dataclasses.replace(program, dropout=False, noise_alpha=30.0)
    accumulate = jax.jit(noisy.accumulate)

    def loss(step=0, micro_batch=0, seed=0):
        state = dataclasses.replace(noisy.init(trainable, seed=seed), step=jnp.int32(step))
        return float(accumulate(noisy.zero_sums(trainable), state, frozen, batch, jnp.int32(micro_batch)).loss)

    assert loss() == loss()
    assert len({loss(), loss(step=1), loss(micro_batch=1), loss(seed=1)}) == 4
    state = noisy.init(trainable, seed=0)
    assert [*map(float, noisy.evaluate(state.trainable, frozen, batch)[:2])] == [
        *map(float, program.evaluate(state.trainable, frozen, batch)[:2])
    ]
    model = nnx.merge(program.graph, trainable, frozen)
    forward = Forward(noise=(jax.random.key(0), 30.0))
    assert bool((forward.frozen(model, batch) == Forward()(model, batch)).all())
    lengths = np.asarray([[12] * 12 + [3] * 3 + [1]] * 500)
    segments = jnp.asarray([[1] * 12 + [2] * 3 + [3]] * 500)
    layout = packed_layout(lengths.shape, segments)
    noise = np.asarray(noised(jnp.zeros((*lengths.shape, 8)), layout, jax.random.key(1), 2.0))
    largest = 2.0 / np.sqrt(lengths * 8)
    share = noise / largest[..., None]
    assert np.abs(share).max() <= 1.0
    for tokens in (12, 3, 1):  # a uniform number within 1 has a mean square of a third
        assert (share[lengths == tokens] ** 2).mean() == pytest.approx(1 / 3, rel=0.03)
        assert abs(share[lengths == tokens].mean()) < 0.03


def test_init_copies_what_the_caller_holds(parts):
    program, trainable, *_ = parts
    state = program.init(trainable, seed=0)
    donated = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
    donated(state.trainable)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(trainable))


# ---- precision


def equations(jaxpr):
    """Every equation of a jaxpr, those of inner jaxprs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def accumulate_jaxpr(model, rows=2, length=LENGTH, **options):
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    program = StepProgram(graph, optax.adam(1e-2), lambda step: 1e-2, **options)
    state = jax.eval_shape(lambda t: program.init(t, 0), trainable)
    sums = jax.eval_shape(program.zero_sums, trainable)
    batch = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), Batch.empty(rows, length))
    index = jax.ShapeDtypeStruct((), jnp.int32)
    jaxpr = jax.make_jaxpr(program.accumulate)(sums, state, frozen, batch, index).jaxpr
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]  # without what no result needs


def with_dtype(model, dtype):
    model.dtype = dtype
    return model


FEATURES = dict(qk_norm="head", stages=PRE_AND_POST_NORM, qkv_bias=True, attention_soft_cap=5.0, final_soft_cap=5.0)


def products(dtype, stored="float32"):
    model = get_peft_model(tiny_model(stored, **FEATURES), r=2, use_dora=True, modules_to_save=["lm_head"])
    found = [e for e in equations(accumulate_jaxpr(with_dtype(model, dtype))) if e.primitive.name == "dot_general"]
    assert len(found) > 40
    return found


@pytest.mark.full
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_fp32_is_fp32_from_end_to_end(stored):
    """Every product multiplies fp32 operands at the highest precision: no TF32, no bf16 in between."""
    highest = (jax.lax.Precision.HIGHEST,) * 2
    allowed = {stored, "float32"}  # DoRA's norms of stored weights multiply them as they are, exactly
    for equation in products("float32", stored):
        assert equation.params["precision"] == highest, equation
        assert {str(v.aval.dtype) for v in equation.invars} <= allowed, equation
        assert str(equation.outvars[0].aval.dtype) == "float32", equation


def test_bf16_multiplies_bf16_and_keeps_fp32_masters():
    low = [e for e in products("bfloat16") if {str(v.aval.dtype) for v in e.invars} == {"bfloat16"}]
    others = [e for e in products("bfloat16") if {str(v.aval.dtype) for v in e.invars} != {"bfloat16"}]
    assert len(low) > 35
    # What is left in fp32: row norms of DoRA, whose operands have the shape of a weight or of its adapter.
    assert all(e.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2 for e in others)
    for e in low:
        assert str(e.outvars[0].aval.dtype) in ("bfloat16", "float32")


def test_whole_logits_never_exist_while_training():
    """A vocabulary of 128k, 8 rows of 2,048: no array of the program is as large as [B, T, V], or half of it."""
    rows, length, vocab = 8, 2048, 128_256
    config = tiny_config(vocab_size=vocab, max_position_embeddings=length, layers=(LayerSpec(),))
    model = nnx.eval_shape(
        lambda: get_peft_model(Decoder(config, jax.random.key(0), "bfloat16"), r=2, modules_to_save=["lm_head"])
    )
    sizes = [
        math.prod(v.aval.shape)
        for e in equations(accumulate_jaxpr(model, rows, length))
        for v in e.outvars
        if hasattr(v.aval, "shape")
    ]
    assert max(sizes) < rows * length * vocab / 4
    assert max(sizes) > vocab * config.hidden_size  # the walk did see the chunks


# ---- update: any pytree will do


def program_of(config=None, schedule=None, **options) -> StepProgram:
    schedule = schedule or optax.constant_schedule(0.1)
    return StepProgram(
        None, make_optimizer(config or OptimConfig(name="sgd", momentum=0.0), schedule), schedule, **options
    )


def parameters():
    draw = np.random.default_rng(0)
    return {
        "matrix": jnp.asarray(draw.standard_normal((4, 3)), jnp.float32),
        "norm": jnp.asarray(draw.standard_normal(5), jnp.float32),
        "scalar": jnp.float32(2.0),
    }


def sums_of(gradients, loss=6.0, count=3.0) -> Sums:
    return Sums(gradients, jnp.float32(loss), jnp.float32(count))


def random_gradients(seed):
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(draw.standard_normal(p.shape), jnp.float32), parameters())


def norm_of(tree) -> float:
    return math.sqrt(sum(float((np.asarray(leaf, np.float64) ** 2).sum()) for leaf in jax.tree.leaves(tree)))


@pytest.mark.parametrize("limit", [None, 0.5, 100.0])
def test_the_mean_and_the_clip(limit):
    program = program_of(max_grad_norm=limit, micro_batches=2)
    gradients = random_gradients(1)
    state = program.init(parameters(), seed=0)
    new, sums, metrics = program.update(state, sums_of(gradients))
    mean = jax.tree.map(lambda g: np.asarray(g, np.float64) / 3, gradients)
    norm = norm_of(mean)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)  # before the clip
    np.testing.assert_allclose(metrics["loss"], 2.0, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norms"], [norm_of(mean[k]) for k in sorted(mean)], rtol=1e-6)
    moved = jax.tree.map(
        lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), state.trainable, new.trainable
    )
    np.testing.assert_allclose(norm_of(moved) / 0.1, min(norm, limit or math.inf), rtol=1e-5)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(sums))


def test_a_step_without_targets_has_no_loss_and_no_gradient():
    program = program_of()
    state = program.init(parameters(), seed=0)
    new, _, metrics = program.update(state, sums_of(jax.tree.map(jnp.zeros_like, parameters()), 0.0, 0.0))
    assert metrics["finite"] and float(metrics["loss"]) == 0.0 and float(metrics["count"]) == 0.0
    assert bits(new.trainable) == bits(state.trainable)


def adamw_in_numpy(config, rate, steps):
    """Decoupled weight decay (arXiv 1711.05101), float64; matrices decay, the rest does not."""
    values = {key: np.asarray(value, np.float64) for key, value in parameters().items()}
    first = {key: np.zeros_like(value) for key, value in values.items()}
    second = {key: np.zeros_like(value) for key, value in values.items()}
    for step in range(1, steps + 1):
        for key, gradient in random_gradients(step).items():
            g = np.asarray(gradient, np.float64) / 3
            first[key] = config.beta1 * first[key] + (1 - config.beta1) * g
            second[key] = config.beta2 * second[key] + (1 - config.beta2) * g * g
            mean, square = first[key] / (1 - config.beta1**step), second[key] / (1 - config.beta2**step)
            decay = config.weight_decay if key == "matrix" else 0.0
            values[key] = values[key] - rate(step - 1) * (mean / (np.sqrt(square) + config.eps) + decay * values[key])
    return values


def test_adamw_is_the_formula():
    config = OptimConfig(weight_decay=0.3, beta1=0.8, beta2=0.95, eps=1e-3)
    rates = ScheduleConfig(name="linear", warmup_steps=2)
    schedule = learning_rate_schedule(rates, 0.1, 6)
    program = program_of(config, schedule, max_grad_norm=None)
    state = program.init(parameters(), seed=0)
    for step in range(1, 6):
        state, _, metrics = program.update(state, sums_of(random_gradients(step)))
        np.testing.assert_allclose(metrics["learning_rate"], float(schedule(step - 1)), rtol=1e-6)
    for key, want in adamw_in_numpy(config, lambda step: float(schedule(step)), 5).items():
        np.testing.assert_allclose(state.trainable[key], want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_the_rate_times_the_matrix_in_every_optimizer(name):
    moved = {}
    for decay in (0.0, 0.5):
        program = program_of(OptimConfig(name=name, weight_decay=decay))
        state = program.init(parameters(), seed=0)
        for step in (1, 2):
            before = state.trainable
            state, *_ = program.update(state, sums_of(random_gradients(step)))
        if decay:
            shrunk = jax.tree.map(lambda a: np.asarray(a), state.trainable)
        moved[decay] = state.trainable
    # The matrix at its second step felt the rate of 0.1 twice; the rest not at all.
    del before
    first = np.asarray(parameters()["matrix"])
    plain = program_of(OptimConfig(name=name))
    state = plain.init(parameters(), seed=0)
    state, *_ = plain.update(state, sums_of(random_gradients(1)))
    after_one = np.asarray(state.trainable["matrix"]) - 0.1 * 0.5 * first
    np.testing.assert_allclose(
        shrunk["matrix"] - np.asarray(moved[0.0]["matrix"]), -0.05 * first - 0.05 * after_one, atol=1e-6
    )
    for key in ("norm", "scalar"):
        np.testing.assert_array_equal(moved[0.5][key], moved[0.0][key])


def test_dora_magnitudes_norms_and_biases_do_not_decay():
    model = get_peft_model(tiny_model(layers=(LayerSpec(),)), r=2, use_dora=True)
    full = tiny_model(layers=(LayerSpec(),), qkv_bias=True)
    for tree in (nnx.state(model, nnx.Param), nnx.state(full, nnx.Param)):
        optimizer = make_optimizer(OptimConfig(name="sgd", momentum=0.0, weight_decay=1.0), lambda step: 1.0)
        zero = jax.tree.map(jnp.zeros_like, tree)
        ones = jax.tree.map(jnp.ones_like, tree)
        updates, _ = optimizer.update(zero, optimizer.init(ones), ones)
        for path, update in jax.tree_util.tree_leaves_with_path(updates):
            name = jax.tree_util.keystr(path)
            still = any(word in name for word in ("magnitude", "norm", "bias"))
            assert not np.asarray(update).any() if still else np.asarray(update).all(), name


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_biases_of_experts_do_not_decay(name, by_tensor):
    """They have two dimensions; as in transformers."""
    moe = MoEConfig(4, 2, 32, router_bias=True, expert_bias=True, transposed=True)
    tree = jax.tree.map(jnp.ones_like, nnx.state(tiny_model("float32", layers=(LayerSpec(),), moe=moe), nnx.Param))
    config = OptimConfig(name=name, weight_decay=0.5)
    program = program_of(config, bound=update_bound(config, 1.0), by_tensor=by_tensor)
    state, _, _ = program.update(program.init(tree, seed=0), sums_of(jax.tree.map(jnp.zeros_like, tree)))
    moved = dict(zip(trainable_names(tree), jax.tree.leaves(state.trainable), strict=True))
    biases = [name for name, value in moved.items() if name.endswith("bias")]
    assert len(biases) == 3 and all(value.ndim >= 2 for name, value in moved.items() if "experts" in name)
    for name, value in moved.items():
        assert np.asarray(value != 1).all() == (value.ndim >= 2 and name not in biases), name


@pytest.mark.parametrize("by_tensor", [False, True])
def test_embeddings_have_a_learning_rate_of_their_own(by_tensor):
    """In updates of all tensors at once and one by one; the adapter's matrices keep the other one."""
    model = get_peft_model(tiny_model(layers=(LayerSpec(),)), r=2, modules_to_save=("embed_tokens", "lm_head"))
    tree = nnx.state(model, nnx.Param)
    moved = []
    for own in (None, 0.02):  # a fifth of the others' 0.1
        config = OptimConfig("adamw", learning_rate=0.1, embedding_learning_rate=own, weight_decay=0.5)
        program = program_of(config, bound=update_bound(config, 1.0), by_tensor=by_tensor)
        state, _, _ = program.update(program.init(tree, seed=0), sums_of(jax.tree.map(jnp.ones_like, tree)))
        moved.append(jax.tree.map(lambda new, old: new - old, state.trainable, tree))
    for name, plain, scaled in zip(trainable_names(tree), *map(jax.tree.leaves, moved), strict=True):
        share = 0.2 if name in ("embedding.weight", "head.weight") else 1.0
        np.testing.assert_allclose(scaled, share * plain, rtol=1e-3, atol=1e-6, err_msg=name)
    assert sum(name in ("embedding.weight", "head.weight") for name in trainable_names(tree)) == 2
    faster = update_bound(OptimConfig(learning_rate=0.1, embedding_learning_rate=0.3, weight_decay=0.5), 1.0)
    assert (round(faster.decay, 6), round(faster.direction * 1e-8, 6)) == (1.5, 3.0)


def test_sgd_with_momentum_is_the_formula():
    program = program_of(OptimConfig(name="sgd", momentum=0.9), max_grad_norm=None)
    state = program.init(parameters(), seed=0)
    want, velocity = np.asarray(parameters()["norm"], np.float64), 0.0
    for step in (1, 2, 3):
        state, *_ = program.update(state, sums_of(random_gradients(step)))
        velocity = 0.9 * velocity + np.asarray(random_gradients(step)["norm"], np.float64) / 3
        want = want - 0.1 * velocity
    np.testing.assert_allclose(state.trainable["norm"], want, rtol=2e-6, atol=1e-6)


def test_adafactor_factors_large_matrices_and_clips_the_update():
    """Algorithm 4 of arXiv 1804.04235 with its update clipping; state of two vectors for a matrix."""
    size = (128, 160)
    optimizer = make_optimizer(OptimConfig(name="adafactor"), lambda step: 0.1)
    value = jnp.zeros(size)
    state = optimizer.init(value)
    assert max(leaf.size for leaf in jax.tree.leaves(state)) == 160
    draw = np.random.default_rng(0)
    rows, columns = np.zeros(size[0]), np.zeros(size[1])
    for step in (1, 2, 3):
        gradient = draw.standard_normal(size) * 10.0**step  # growing: the clip must act
        update, state = optimizer.update(jnp.asarray(gradient, jnp.float32), state, value)
        decay = 1 - step**-0.8
        rows = decay * rows + (1 - decay) * (gradient**2).mean(1)
        columns = decay * columns + (1 - decay) * (gradient**2).mean(0)
        want = gradient / np.sqrt(np.outer(rows, columns) / rows.mean())
        assert step == 1 or np.sqrt((want**2).mean()) > 1.2
        want = want / max(1.0, np.sqrt((want**2).mean()))
        np.testing.assert_allclose(update, -0.1 * want, rtol=1e-4, atol=1e-6)


def test_an_unknown_optimizer_or_schedule():
    with pytest.raises(ValueError, match="optim.name = 'adan': must be adamw, adamw_8bit, lion, lion_8bit, muon, "):
        make_optimizer(OptimConfig(name="adan"), lambda step: 1.0)
    with pytest.raises(ValueError, match="schedule.name = 'step': must be linear, cosine, cosine_with_restarts, "):
        learning_rate_schedule(ScheduleConfig(name="step"), 1.0, 10)


@pytest.mark.parametrize("poison", ["gradient", "loss", "infinite loss"])
def test_a_bad_number_anywhere_skips_the_update(poison):
    program = program_of(OptimConfig())
    state = program.init(parameters(), seed=0)
    gradients = random_gradients(1)
    if poison == "gradient":
        gradients["norm"] = gradients["norm"].at[2].set(jnp.inf)
    loss = {"gradient": 6.0, "loss": math.nan, "infinite loss": math.inf}[poison]
    new, _, metrics = program.update(state, sums_of(gradients, loss))
    assert not metrics["finite"]
    assert bits((new.trainable, new.opt_state)) == bits((state.trainable, state.opt_state))
    assert (int(new.step), int(new.skipped), int(new.skipped_in_row)) == (1, 1, 1)


def test_an_update_that_overflows_is_skipped():
    """Finite gradients under a rate that is far too high: the parameters stay finite, the step counts as skipped."""
    program = program_of(OptimConfig(name="sgd", momentum=0.0), optax.constant_schedule(3e38), max_grad_norm=None)
    state = program.init(parameters(), seed=0)
    new, _, metrics = program.update(state, sums_of(jax.tree.map(lambda g: 100 * g, random_gradients(1))))
    assert math.isfinite(metrics["grad_norm"]) and not metrics["finite"]
    assert bits(new.trainable) == bits(state.trainable)


# ---- fp16


def test_loss_scaling_halves_at_an_overflow_and_grows_after_good_steps(monkeypatch):
    from jaxtune.train.program import step as step_module

    monkeypatch.setattr(step_module, "_GROWTH_STEPS", 3)
    program = program_of(OptimConfig(), scale_loss=True)
    state = program.init(parameters(), seed=0)
    assert float(state.loss_scale) == 2.0**16
    bad = jax.tree.map(lambda g: g.at[...].set(jnp.inf), random_gradients(0))
    state, _, metrics = program.update(state, sums_of(bad))
    assert float(state.loss_scale) == float(metrics["loss_scale"]) == 2.0**15
    assert int(state.skipped) == 1 and int(state.opt_state[0].count) == 0
    assert bits(state.trainable) == bits(parameters())
    for good in (1, 2):
        state, *_ = program.update(state, sums_of(random_gradients(good)))
        assert float(state.loss_scale) == 2.0**15 and int(state.good_steps) == good
    state, *_ = program.update(state, sums_of(bad))  # an overflow begins the count anew
    assert float(state.loss_scale) == 2.0**14 and int(state.good_steps) == 0
    for good in (1, 2, 3):
        state, *_ = program.update(state, sums_of(random_gradients(good)))
    assert float(state.loss_scale) == 2.0**15 and int(state.good_steps) == 0
    assert int(state.opt_state[0].count) == 5 and int(state.skipped) == 2


def test_the_scale_is_taken_out_of_gradients_and_out_of_nothing_else():
    plain, scaled = program_of(), program_of(scale_loss=True)
    state = scaled.init(parameters(), seed=0)
    larger = jax.tree.map(lambda g: g * 2.0**16, random_gradients(1))
    got = scaled.update(state, sums_of(larger))
    want = plain.update(plain.init(parameters(), seed=0), sums_of(random_gradients(1)))
    assert bits(got[0].trainable) == bits(want[0].trainable)
    for key in ("loss", "grad_norm"):
        assert float(got[2][key]) == float(want[2][key])


def test_the_scale_stays_within_bounds():
    program = program_of(scale_loss=True)
    bad = jax.tree.map(lambda g: g.at[...].set(jnp.inf), random_gradients(0))
    state = dataclasses.replace(program.init(parameters(), seed=0), loss_scale=jnp.float32(1.0))
    assert float(program.update(state, sums_of(bad))[0].loss_scale) == 1.0
    state = dataclasses.replace(state, loss_scale=jnp.float32(2.0**24), good_steps=jnp.int32(10**6))
    assert float(program.update(state, sums_of(random_gradients(1)))[0].loss_scale) == 2.0**24


def test_fp16_gradients_equal_fp32_s():
    """The loss is scaled before the backward in fp16: gradients come out as those of fp32, to fp16's precision."""
    batch = jax.tree.map(jnp.asarray, pack(DOCUMENTS, LENGTH)[0])
    results = {}
    for dtype in ("float32", "float16"):
        model = with_dtype(lora_model(), dtype)
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
        program = StepProgram(graph, optax.sgd(1.0), lambda step: 1.0, scale_loss=dtype == "float16")
        state = dataclasses.replace(
            program.init(trainable, 0), loss_scale=jnp.float32(256.0 if dtype == "float16" else 1)
        )
        sums = jax.jit(program.accumulate)(program.zero_sums(trainable), state, frozen, batch, jnp.int32(0))
        results[dtype] = jax.tree.map(lambda g, s=state: np.asarray(g) / float(s.loss_scale), sums.gradients)
    for a, b in zip(jax.tree.leaves(results["float16"]), jax.tree.leaves(results["float32"]), strict=True):
        np.testing.assert_allclose(a, b, atol=8 * 2**-11 * max(np.abs(b).max(), 1e-6), rtol=0)


# ---- schedules


@pytest.mark.parametrize(
    ("config", "want"),
    [
        (dict(name="constant"), [1.0] * 8),
        (dict(name="constant", warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (dict(name="constant", warmup_steps=1), [1.0] * 8),
        (dict(name="linear"), [1 - step / 8 for step in range(8)]),
        (dict(name="linear", min_ratio=0.2), [1 - 0.8 * step / 8 for step in range(8)]),
        (dict(name="linear", warmup_steps=2), [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (dict(name="linear", warmup_ratio=0.25), [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (dict(name="cosine"), [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]),
        (dict(name="cosine_with_restarts"), [(1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)]),
        (  # transformers' formula
            dict(name="cosine_with_restarts", cycles=3, warmup_steps=2),
            [0.5, 1.0, *((1 + math.cos(math.pi * (3 * step / 6 % 1))) / 2 for step in range(6))],
        ),
        (dict(warmup_steps=2, zero_start=True), [0, 1 / 2, *((8 - step) / 6 for step in range(2, 8))]),
        (dict(name="cosine", min_ratio=0.1), [0.1 + 0.9 * (1 + math.cos(math.pi * s / 8)) / 2 for s in range(8)]),
    ],
)
def test_schedules(config, want):
    schedule = learning_rate_schedule(ScheduleConfig(**config), 3.0, 8)
    got = [float(schedule(jnp.int32(step))) for step in range(8)]
    np.testing.assert_allclose(got, 3.0 * np.asarray(want), rtol=1e-5)


@pytest.mark.parametrize("name", ["linear", "cosine", "cosine_with_restarts"])
def test_a_schedule_ends_at_its_last_rate_and_stays(name):
    schedule = learning_rate_schedule(ScheduleConfig(name=name, warmup_steps=3, min_ratio=0.25), 2.0, 10)
    np.testing.assert_allclose([float(schedule(10)), float(schedule(50))], [0.5, 0.5], rtol=1e-6)


def test_the_loss_is_a_sum_and_a_count():
    model = lora_model()
    batch = jax.tree.map(jnp.asarray, pack(DOCUMENTS, LENGTH)[0])
    loss, count, _ = loss_sums(model, batch)
    logits = np.asarray(model(batch.tokens, batch.segment_ids, batch.positions), np.float64)
    logits -= logits.max(-1, keepdims=True)
    nll = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.asarray(batch.targets)[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, (nll * np.asarray(batch.weights)).sum(), rtol=1e-6)
    assert loss.dtype == count.dtype == jnp.float32
    assert float(count) == sum(int(d.mask[1:].sum()) for d in DOCUMENTS)
