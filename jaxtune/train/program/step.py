"""The train step as two programs, compiled once for all data. `accumulate` adds a micro-batch's loss, count and
gradients to donated sums; `update` divides once, clips, updates and returns zeroed sums. Python dispatches
micro-batches, because a loop in one program would keep transfers from overlapping with compute. Nothing waits for the
device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.decoder import Decoder
from jaxtune.models.placement import partition
from jaxtune.models.stack.residual_plan import ResidualPlan
from jaxtune.pallas.rounding import stochastic_round
from jaxtune.train.data.batches import Batch
from jaxtune.train.objectives.loss import NO_AUX_LOSSES, AuxLosses, Forward
from jaxtune.train.objectives.named import DEFAULT
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.optimizer import optimizer_offload, stacks
from jaxtune.train.optimizer.optim import UpdateBound, decayed_tensors, embedding_tensors, step_optimizer
from jaxtune.train.program.gradient_sync import GradientSync

# Dynamic loss scaling for fp16: the scale is doubled after this many finite steps, and halved after an overflow.
_GROWTH_STEPS = 2000
_FIRST_SCALE = 2.0**16
# Numbers folded into the run's key for stochastic rounding of weights, noise on the embeddings, and stochastic rounding
# of gradients. Dropout folds in the step's number, which never reaches them.
_ROUNDING, _NOISE, _SYNC = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step takes and returns and a checkpoint stores; all arrays. Only `dropout_key` never changes."""

    trainable: Any  # nnx.State of weights, in the dtypes of StepProgram.weights
    opt_state: Any  # the optimizer's state, as its `init` makes it
    step: jax.Array  # int32: optimizer steps made, skipped updates included
    skipped: jax.Array  # int32: updates skipped because the loss, the gradient or the new weights were not finite
    skipped_in_row: jax.Array  # int32: the number of updates skipped since the last one made
    loss_scale: jax.Array  # float32: for fp16; 1 otherwise
    good_steps: jax.Array  # int32: finite steps since the loss scale changed, for fp16; 0 otherwise
    dropout_key: jax.Array  # uint32 key data, from which dropout, embedding noise and stochastic rounding draw
    # errors of a quantised gradient sync, as GradientSync.first_errors makes them; {} without
    sync_errors: dict[str, list[jax.Array]] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the micro-batches of a step. On several devices arrays have a leading axis of devices. A single
    micro-batch adds over devices itself, so that gradients are stored once; with several, or a quantised sync, the
    update does. Tensors divided over n devices are summed over these in each micro-batch; their leading axis is n times
    shorter.
    """

    # of (loss sum + count times the layers' own losses with their coefficients), times TrainState.loss_scale: float32,
    # or in the weights' dtypes if a step has one micro-batch
    gradients: Any
    loss: jax.Array  # float32 sum of weighted losses, neither scaled nor with the layers' own losses
    count: jax.Array  # float32: the objective's count, such as the number of targets
    aux: jax.Array | None = None  # float32[n]: the layers' own losses times the count; None if none is added
    objective_sums: dict[str, jax.Array] = dataclasses.field(default_factory=dict)  # the objective's own sums, by name


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """The functions that a run jits, with all static values. They take and return whole arrays, placed by `shardings`
    and `sums_shardings`.
    """

    graph: nnx.GraphDef  # graph definition of the model
    optimizer: optax.GradientTransformation  # an optax transformation or an optim.StepOptimizer, over float32 tensors
    schedule: optax.Schedule | None  # learning rate by number of updates, for metrics and `bound`; None: unknown
    objective: Objective = DEFAULT  # defines the loss of a micro-batch and further measurements
    plan: ResidualPlan | None = None  # what becomes of values that the backward reads (residuals); None: all are kept
    max_documents: int | None = None  # the most documents in a row, which allows faster attention; None: unknown
    max_pictures: int | None = None  # the same of pictures, for a tower's attention
    max_grad_norm: float | None = 1.0  # global norm to which gradients are clipped; None: no clipping
    dropout: bool = False  # whether any adapter has dropout
    scale_loss: bool = False  # dynamic loss scaling (fp16)
    # dtype of trained matrices: "bf16" is rounded stochastically after each float32 update
    weights: Literal["fp32", "bf16"] = "fp32"
    micro_batches: int = 1  # number of micro-batches of a step
    chunk_tokens: int | None = None  # number of tokens whose logits exist at a time; None: the loss decides
    aux_losses: AuxLosses = NO_AUX_LOSSES  # the layers' own losses, added to the objective's
    # a bound on an update's elements that is known before the update (optim.update_bound). Without one an update is
    # computed twice, because whether it is finite must be known before old states are overwritten.
    bound: UpdateBound | None = None
    by_tensor: bool = False  # whether tensors are updated one by one; False: all at once, as one tree
    # whether the optimizer's large states are on the host (optimizer_offload.py); needs bound, and updates by tensor
    offload: bool = False
    # whether small tensors of one shape may lie in one array between steps and be updated as one; needs bound, float32
    # weights and an optimizer that treats each element alone
    stackable: bool = False
    full: bool = False  # every row of a training step is one document without padding (PackedLayout.full)
    noise_alpha: float | None = None  # NEFTune's noise on the embeddings in gradient steps; None: no noise
    # divides rows and tensors (models/placement/partition.py); None or one device: nothing is divided
    mesh: jax.sharding.Mesh | None = None
    gradient_sync: GradientSync | None = None  # how devices exchange gradients; None: in float32

    @property
    def sync(self) -> GradientSync | None:
        """The quantised sync; None: float32, or one device."""
        return None if self.devices == 1 else self.gradient_sync

    @property
    def _sums_at_once(self) -> bool:
        """Whether the only micro-batch adds over devices, not the update."""
        return self.micro_batches == 1 and self.sync is None

    @property
    def _reads_sums(self) -> bool:
        """Whether a step adds to its first sums: not with one micro-batch, unless a quantised sync needs them."""
        return self.micro_batches > 1 or self.sync is not None

    @property
    def _largest(self) -> tuple[str, ...]:
        return getattr(self.objective, "largest", ())

    def _of_all_devices(self, sums: Sums) -> Sums:
        largest = {name: partition.largest(sums.objective_sums[name]) for name in self._largest}
        total = of_all_devices(sums)
        return dataclasses.replace(total, objective_sums=total.objective_sums | largest)

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def stacked(self) -> bool:
        return self.stackable and self.devices == 1 and not self.offload

    @property
    def _shape(self) -> partition.MeshShape:
        assert self.mesh is not None
        return partition.MeshShape.of(self.mesh)

    def init(self, trainable, seed: int, device: jax.sharding.Sharding | None = None) -> TrainState:
        """The first state, over a copy of `trainable`, which the step donates. device: sharding of optimizer states
        that stay on the device with `offload`; None: the caller places all.
        """

        def kept(a):
            rounded = self.weights == "bf16" and a.ndim >= 2
            return jnp.array(a, jnp.bfloat16 if rounded else jnp.float32, copy=True)

        trainable = jax.tree.map(kept, trainable)
        wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), trainable)
        if self.offload and device is not None:
            states = optimizer_offload.first_states(self.optimizer, wide, device)
        else:
            states = self.optimizer.init(wide)

        def zero():
            return jnp.zeros((), jnp.int32)  # separate buffers, because a buffer cannot be donated twice

        return TrainState(
            trainable=trainable,
            opt_state=states,
            step=zero(),
            skipped=zero(),
            skipped_in_row=zero(),
            loss_scale=jnp.asarray(_FIRST_SCALE if self.scale_loss else 1.0, jnp.float32),
            good_steps=zero(),
            dropout_key=jax.random.key_data(jax.random.key(seed)),
            sync_errors={} if self.sync is None else self.sync.first_errors(trainable, self._shape),
        )

    def shardings(self, state: TrainState, device: jax.sharding.Sharding) -> TrainState:
        """A TrainState of shardings for `state`, which may be abstract. device: for undivided arrays."""
        where = jax.tree.map(lambda _: device, state)
        if self.mesh is not None and self.devices > 1:
            states = partition.states_shardings(state.opt_state, state.trainable, self.mesh)
            by_device = jax.sharding.NamedSharding(self.mesh, partition.ROWS)
            errors = jax.tree.map(lambda _: by_device, state.sync_errors)
            tensors = partition.shardings(state.trainable, self.mesh)
            where = dataclasses.replace(where, trainable=tensors, opt_state=states, sync_errors=errors)
        if not self.offload:
            return where
        return dataclasses.replace(where, opt_state=optimizer_offload.shardings(state.opt_state, device))

    def sums_shardings(self, trainable, device: jax.sharding.Sharding) -> Sums:
        """A Sums of shardings. device: for undivided arrays."""
        sums = self.sums_shapes(trainable)
        if self.mesh is None or self.devices == 1:
            return jax.tree.map(lambda _: device, sums)
        unsummed = partition.undivided(partition.unsummed_specs(self._divided(sums, trainable)))
        return jax.tree.map(functools.partial(jax.sharding.NamedSharding, self.mesh), unsummed)

    def _divided(self, sums: Sums, trainable) -> Sums:
        """Marks gradients of divided tensors as partition.Shard, from which jax.shard_map's shardings follow."""
        return dataclasses.replace(sums, gradients=partition.divide_like(self._marked(trainable), sums.gradients))

    def _marked(self, trainable):
        """Divided tensors as partition.Shard, with axis and format of their gradient's exchange."""
        return partition.divide(trainable, self.mesh, None if self.sync is None else self.sync.format)

    def sums_shapes(self, trainable) -> Sums:
        """Shapes of the sums for these tensors, not traced, which takes a second for hundreds of them."""
        return self._sums(trainable, jax.ShapeDtypeStruct)

    def _sums(self, trainable, make) -> Sums:
        """made: (shape, dtype) -> a leaf."""
        sum_dtype = jnp.float32 if self.micro_batches > 1 else None

        def leaf(sizes=(), dtype=jnp.float32, devices=self.devices):
            return make((*(() if self.devices == 1 else (devices,)), *sizes), dtype)

        def gradient(tensor):
            if isinstance(tensor, partition.Shard):
                array, devices = tensor.array, self.devices // tensor.count
                return dataclasses.replace(tensor, array=leaf(array.shape, sum_dtype or array.dtype, devices))
            return leaf(tensor.shape, sum_dtype or tensor.dtype)

        tensors = self._marked(trainable)
        gradients = jax.tree.map(gradient, tensors, is_leaf=lambda leaf: isinstance(leaf, partition.Shard))
        aux = leaf((len(self.aux_losses.losses),)) if self.aux_losses else None
        own_sums = {name: leaf() for name in sorted(self.objective.sums)}
        return Sums(partition.undivided(gradients), leaf(), leaf(), aux, own_sums)

    def zero_sums(self, trainable, device: jax.sharding.Sharding | None = None) -> Sums:
        """Zero sums for these tensors. device: sharding of undivided arrays; None: JAX places all."""
        if device is None:
            return self._sums(trainable, jnp.zeros)
        shardings = self.sums_shardings(trainable, device)
        return jax.tree.map(
            lambda shape, sharding: jnp.zeros(shape.shape, shape.dtype, device=sharding),
            self.sums_shapes(trainable),
            shardings,
        )

    def accumulate(self, sums: Sums, state: TrainState, frozen, batch: Batch, micro_batch: jax.Array) -> Sums:
        """`sums` (donated) with a micro-batch added; of a single one only their memory is used. micro_batch: int32[],
        its index in the step, for keys of dropout and noise.
        """
        # What is not needed here; the optimizer's states may be on the host.
        state = dataclasses.replace(state, opt_state=None, sync_errors={})
        if self.devices == 1:
            return self._accumulate(sums, state, frozen, batch, micro_batch)

        def local(sums, *arguments):
            sums = self._accumulate(jax.tree.map(lambda a: a[0], sums), *arguments)
            return jax.tree.map(lambda a: a[None], self._of_all_devices(sums) if self._sums_at_once else sums)

        sums = self._divided(sums, state.trainable)
        state = dataclasses.replace(state, trainable=self._marked(state.trainable))
        frozen, unsummed = partition.divide(frozen, self.mesh), partition.unsummed_specs(sums)
        specs = (unsummed, partition.specs(state), partition.specs(frozen), partition.ROWS, partition.WHOLE)
        run = partition.divided(local, self.mesh, specs, unsummed)
        return partition.undivided(run(sums, state, frozen, batch, micro_batch))

    def _accumulate(self, sums: Sums, state: TrainState, frozen, batch: Batch, micro_batch: jax.Array) -> Sums:
        """`accumulate` on one device, within partition.divided. Keys depend on the step and the micro-batch alone."""
        if self.full:
            batch = dataclasses.replace(batch, segment_ids=None)
        key = noise = None
        if self.dropout:
            key = jax.random.wrap_key_data(state.dropout_key)
            key = jax.random.fold_in(jax.random.fold_in(key, state.step), micro_batch)
        if self.noise_alpha is not None:
            noise_key = jax.random.fold_in(jax.random.wrap_key_data(state.dropout_key), _NOISE)
            noise = jax.random.fold_in(jax.random.fold_in(noise_key, state.step), micro_batch), self.noise_alpha
        if not self._reads_sums:
            batch, sums = kept_argument(batch, sums)
        runs = 0

        def scaled_loss(trainable, layer_sums):
            nonlocal runs
            forward = Forward(
                max_documents=self.max_documents,
                max_pictures=self.max_pictures,
                plan=self.plan,
                chunk_tokens=self.chunk_tokens,
                dropout_key=key,
                gradient_sums=layer_sums,
                aux_losses=self.aux_losses if self.aux_losses else NO_AUX_LOSSES,
                noise=noise,
            )
            loss, count, own_sums = self._loss(nnx.merge(self.graph, trainable, frozen), batch, forward)
            total, aux, runs = loss, forward.aux, forward.runs
            if aux is not None:
                total = loss + partition.total(count) * self.aux_losses.added(aux)
                aux = count * aux
            return total * state.loss_scale if self.scale_loss else total, (loss, count, aux, own_sums)

        # Of several micro-batches the layers' gradients are added to their sums layer by layer, and exist for one.
        layer_sums = sums.gradients.get("layers") if self._reads_sums else None
        (gradients, layers), measured = jax.grad(scaled_loss, (0, 1), has_aux=True)(state.trainable, layer_sums)
        with jax.named_scope("accumulate"):
            new = Sums(gradients, *measured)
            if not self._reads_sums:
                total = jax.tree.map(lambda sum, first: first.astype(sum.dtype), sums, new)
                for name in self._largest:
                    total.objective_sums[name] = jnp.maximum(total.objective_sums[name], 0.0)
                return total
            total = jax.tree.map(jnp.add, sums, new)
            for name in self._largest:
                total.objective_sums[name] = jnp.maximum(sums.objective_sums[name], measured[-1][name])
            if layers is not None and runs:
                # Only the model's first run adds to the sums; gradients of further runs are returned with the tensors'.
                ran_again = runs > 1
                total.gradients["layers"] = jax.tree.map(jnp.add, layers, gradients["layers"]) if ran_again else layers
        return total

    def _loss(self, model: Decoder, batch: Batch, forward: Forward) -> tuple[jax.Array, jax.Array, dict]:
        """(loss sum, count, own sums). ValueError if the objective returned other sums than it declares."""
        loss, count, own_sums = self.objective.loss(model, batch, forward)
        if set(own_sums) != set(self.objective.sums):
            raise ValueError(
                f"{type(self.objective).__name__}.loss returned the sums {sorted(own_sums)}, but its `sums` declares "
                f"{self.objective.sums}: they must be the same"
            )
        sums = {name: jnp.asarray(value, jnp.float32) for name, value in own_sums.items()}
        return loss, jnp.asarray(count, jnp.float32), sums

    def total(self, sums: Sums, state: TrainState) -> tuple[Sums, dict[str, list[jax.Array]]]:
        """(sums over all devices, without the leading axis; new errors of a quantised sync, else {})."""
        if self.devices == 1:
            return sums, {}
        sums = self._divided(sums, state.trainable)
        sum_specs, result = partition.unsummed_specs(sums), partition.specs(sums)

        def local(sums):
            sums = jax.tree.map(lambda a: a[0], sums)
            return sums if self._sums_at_once else self._of_all_devices(sums)

        sync = self.sync
        if sync is None:
            return partition.undivided(partition.divided(local, self.mesh, (sum_specs,), result)(sums)), {}

        def quantised(sums, state):
            sums, errors = jax.tree.map(lambda a: a[0], (sums, state.sync_errors))
            other_sums = self._of_all_devices(dataclasses.replace(sums, gradients=None))
            unit = jnp.maximum(other_sums.count, 1.0) * state.loss_scale
            key = jax.random.fold_in(jax.random.wrap_key_data(state.dropout_key), _SYNC)
            key = jax.random.fold_in(key, state.step)
            gradients, errors = sync.added(sums.gradients, errors, self._shape, unit, key)
            return dataclasses.replace(other_sums, gradients=gradients), jax.tree.map(lambda a: a[None], errors)

        state = dataclasses.replace(state, trainable=None, opt_state=None)
        errors = jax.tree.map(lambda _: partition.ROWS, state.sync_errors)
        specs = dataclasses.replace(partition.specs(state), sync_errors=errors)
        run = partition.divided(quantised, self.mesh, (sum_specs, specs), (result, errors))
        return partition.undivided(run(sums, state))

    def update(self, state: TrainState, sums: Sums) -> tuple[TrainState, Sums, dict[str, jax.Array]]:
        """One optimizer step; both arguments are donated. Returns (state, sums for the next step, metrics): loss (mean,
        without layers' losses), aux ({name: layers' losses before coefficients}), own (the objective's), grad_norm
        (before clipping), learning_rate, count, finite (False: weights and states stay), skipped, skipped_in_row,
        loss_scale, grad_norms float32[n] of each tensor.
        """
        with jax.named_scope("optimizer"):
            donated_sums, (sums, errors) = sums, self.total(sums, state)
            count = jnp.maximum(sums.count, 1.0)
            scale = 1.0 / (count * state.loss_scale)

            def summed_squares(gradients):
                scaled = gradients.astype(jnp.float32) * scale
                return jnp.sum(scaled * scaled, axis=range(1, scaled.ndim))

            squares = self._of_each(summed_squares, jax.tree.leaves(sums.gradients))
            norm = jnp.sqrt(squares.sum())  # shows a layer's loss that is not finite
            finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
            if self.max_grad_norm is not None:
                scale *= jnp.minimum(1.0, self.max_grad_norm / (norm + 1e-6))
            optimizer = step_optimizer(self.optimizer)
            in_parts = partition.which_are_divided(state.trainable, self.mesh)

            def moved(parameters, opt_state, gradients, finite, divided=in_parts, **extra_args):
                """(float32 parameters after the update, new states, or the old ones if not `finite`)."""
                wide = jax.tree.map(lambda a: a.astype(jnp.float32), parameters)
                updates, opt_state = optimizer.update(
                    gradients, opt_state, wide, scale=scale, finite=finite, divided=divided, **extra_args
                )
                return jax.tree.map(jnp.add, wide, updates), opt_state

            # With a learning rate that is too high, a finite gradient can give infinite weights, which must not reach a
            # checkpoint. It is decided before any update, so that each tensor's new state can overwrite the old one.
            largest = jnp.finfo(jnp.bfloat16 if self.weights == "bf16" else jnp.float32).max
            tensors = (state.trainable, state.opt_state, sums.gradients)
            if self.bound is not None:
                finite &= self._reach(self.bound, state) <= largest
            else:
                wide, _ = moved(*tensors, finite=True)
                leaves = jax.tree.leaves(wide)
                finite &= self._of_each(lambda x: (jnp.abs(x) <= largest).all(range(1, x.ndim)), leaves).all()
                # Without a barrier XLA would keep the values computed for this decision (43 GB for an 8B model).
                tensors, finite = optimization_barrier((tensors, finite))

            def guarded(new, old):
                return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

            decayed, embeddings = decayed_tensors(state.trainable), embedding_tensors(state.trainable)
            by_name = {"divided": in_parts, "decayed": decayed, "embeddings": embeddings}
            if self.stacked:

                def equal(index, parameter, opt_state, gradient):
                    its = {name: [values[index]] for name, values in by_name.items()}
                    wide, new = moved([parameter], opt_state, [gradient], finite, **its)
                    return guarded(wide[0], parameter), new

                alike = list(zip(decayed, embeddings, strict=True))
                trainable, opt_state = stacks.updated(equal, *tensors, alike=alike)
            elif self.by_tensor or self.offload:

                def one(index, parameter, opt_state, gradient):
                    its = {name: [values[index]] for name, values in by_name.items()}
                    wide, new = moved([parameter], opt_state, [gradient], finite, **its)
                    rounded = self._kept(state, wide, [parameter], index)
                    return guarded(rounded[0], parameter), new

                trainable, opt_state = optimizer_offload.update_by_tensor(one, *tensors, offload=self.offload)
            else:
                wide, opt_state = moved(*tensors, finite=finite)
                trainable = guarded(self._kept(state, wide, state.trainable), tensors[0])

            results = trainable, guarded(errors, state.sync_errors)
            # With states on the host zeros are made if nobody reads them, too, as copies of states lie there before.
            zeros = self._reads_sums or self.offload
            (trainable, errors), next_sums = zeros_after(results, donated_sums, zeros, self.sync is not None)
            new = dataclasses.replace(self._next(state, trainable, opt_state, finite), sync_errors=errors)
            counters = {name: getattr(new, name) for name in ("skipped", "skipped_in_row", "loss_scale")}
            counters |= {"grad_norm": norm, "finite": finite, "grad_norms": jnp.sqrt(squares)}
            metrics = self._means(sums, count) | counters
            if self.schedule is not None:
                metrics["learning_rate"] = jnp.asarray(self.schedule(state.step - state.skipped), jnp.float32)
            if sums.aux is not None:
                metrics["aux"] = dict(zip(self.aux_losses.names, sums.aux / count, strict=True))
            return new, next_sums, metrics

    def _of_each(self, reduce, tensors: list[jax.Array]) -> jax.Array:
        return stacks.of_each(reduce, tensors, None if self.stacked else stacks.FEW)

    def _means(self, sums: Sums, count: jax.Array) -> dict:
        return {
            "loss": sums.loss / count,
            "count": sums.count,
            "own": self.objective.metrics({"loss": sums.loss, "count": sums.count} | sums.objective_sums),
        }

    def _next(self, state: TrainState, trainable, opt_state, finite: jax.Array) -> TrainState:
        """The next state, with counts and loss scale; the caller sets sync_errors."""
        skip = (~finite).astype(jnp.int32)
        loss_scale, good_steps = state.loss_scale, state.good_steps
        if self.scale_loss:
            grow = finite & (good_steps + 1 >= _GROWTH_STEPS)
            loss_scale = jnp.where(finite, jnp.where(grow, loss_scale * 2, loss_scale), loss_scale / 2)
            loss_scale = jnp.clip(loss_scale, 1.0, 2.0**24)
            good_steps = jnp.where(finite & ~grow, good_steps + 1, 0)
        return TrainState(
            trainable=trainable,
            opt_state=opt_state,
            step=state.step + 1,
            skipped=state.skipped + skip,
            skipped_in_row=(state.skipped_in_row + 1) * skip,
            loss_scale=loss_scale,
            good_steps=good_steps,
            dropout_key=state.dropout_key,
        )

    def _reach(self, bound: UpdateBound, state: TrainState) -> jax.Array:
        """float32[]: no weight exceeds it in absolute value after the update, known before."""
        assert self.schedule is not None  # optimizers with a bound take their rate from the schedule
        rate = jnp.asarray(self.schedule(state.step - state.skipped), jnp.float32)
        highest = self._of_each(lambda x: jnp.abs(x).max(range(1, x.ndim)), jax.tree.leaves(state.trainable)).max()
        return highest.astype(jnp.float32) * (1.0 + rate * bound.decay) + rate * bound.direction

    def _kept(self, state: TrainState, wide, old, stream: int = 0):
        """Updated weights in their stored dtypes; tensor i is rounded by random stream `stream` + i."""
        if self.weights == "fp32":
            return wide
        key = jax.random.fold_in(jax.random.wrap_key_data(state.dropout_key), _ROUNDING)
        seed = jax.random.key_data(jax.random.fold_in(key, state.step))
        return rounded_like(old, wide, seed, stream)

    def evaluate(self, trainable, frozen, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """(loss sum, count, own sums) of a held-out batch on all devices, without dropout and the layers' losses; to be
        jitted. trainable, frozen: states of the model, divided as the mesh says.
        """

        def local(trainable, frozen, batch):
            forward = Forward(
                max_documents=self.max_documents, max_pictures=self.max_pictures, chunk_tokens=self.chunk_tokens
            )
            loss, count, own_sums = self._loss(nnx.merge(self.graph, trainable, frozen), batch, forward)
            largest = {name: partition.largest(own_sums[name]) for name in self._largest}
            loss, count, own_sums = partition.total((loss, count, own_sums))
            return loss, count, own_sums | largest

        tensors = partition.divide((trainable, frozen), self.mesh)
        run = partition.divided(local, self.mesh, (*partition.specs(tensors), partition.ROWS), partition.WHOLE)
        return run(*tensors, batch)

    def of_rows(self, function, trainable, frozen, batch: Batch) -> jax.Array:
        """function(model, batch, Forward); to be jitted. Each device has its rows, and the result stays divided by rows
        (partition.ROWS), as out_shardings must say. trainable, frozen: states of the model, divided as the mesh says.
        """

        def local(trainable, frozen, batch):
            forward = Forward(
                max_documents=self.max_documents, max_pictures=self.max_pictures, chunk_tokens=self.chunk_tokens
            )
            return function(nnx.merge(self.graph, trainable, frozen), batch, forward)

        tensors = partition.divide((trainable, frozen), self.mesh)
        run = partition.divided(local, self.mesh, (*partition.specs(tensors), partition.ROWS), partition.ROWS)
        return run(*tensors, batch)


def without_update(program: StepProgram) -> StepProgram:
    """What accumulate, evaluate and of_rows read of a program: they are compiled once for all learning rates."""
    unread: dict[str, object] = dict(schedule=None, bound=None, max_grad_norm=None, by_tensor=False, offload=False)
    return dataclasses.replace(program, optimizer=optax.identity(), **unread)


def without_layers(program: StepProgram) -> StepProgram:
    """What `update` reads of a program: it is compiled once for all rows."""
    unread: dict[str, object] = dict(plan=None, max_documents=None, chunk_tokens=None, dropout=False, noise_alpha=None)
    return dataclasses.replace(program, full=False, max_pictures=None, **unread)


def of_all_devices(sums):
    """One device's sums (a tree) added over the mesh, within `partition.divided`. Added in float32, so that bf16 sums
    are not rounded once for each device, then cast back. A partition.Shard is added over the axes other than fsdp.
    """
    wide = partition.total(jax.tree.map(lambda a: a.astype(jnp.float32), sums))
    return jax.tree.map(lambda new, old: new.astype(old.dtype), wide, sums)


def zeros_after(done, given, read: bool, waits: bool):
    """(done, zeros like `given`): the zeros with which the next step's sums start. Use the returned `done`.

    XLA writes the zeros into donated `given`; if it may at any time, it first copies arrays that are read later. With
    `waits` the zeros depend on `done`, so there is no copy, and temporaries may lie in `given` meanwhile: a quantised
    sync needs that, else it copies all gradients. read: False: zeros are not needed, `given` comes back.
    """
    if not read:
        return done, given
    if not waits:
        return done, jax.tree.map(jnp.zeros_like, given)
    done, zero = optimization_barrier((done, jnp.zeros((), jnp.float32)))
    return done, jax.tree.map(lambda array: jnp.full(array.shape, zero, array.dtype), given)


def kept_argument(batch, sums):
    """(batch, sums) of a step with one micro-batch, which does not read `sums`: the free barrier keeps them an argument
    of the program, whose memory XLA gives to the gradients and before to other values (sums_memory.py).
    """
    return optimization_barrier((batch, sums))


def rounded_like(old, wide, seed: jax.Array, stream: int):
    """`wide` (float32 weights) with those rounded stochastically that are bfloat16 in `old`. Tensor i uses random
    stream `stream` + i.
    """
    leaves, structure = jax.tree.flatten(wide)
    pairs = enumerate(zip(leaves, jax.tree.leaves(old), strict=True), stream)
    return jax.tree.unflatten(
        structure,
        [stochastic_round(new, seed, i) if old_leaf.dtype == jnp.bfloat16 else new for i, (new, old_leaf) in pairs],
    )
