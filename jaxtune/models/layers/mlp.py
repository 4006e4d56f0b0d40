"""The gated MLP, a feed-forward: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import MLP_BYTES, MLPBytes
from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Residual, Scratch, Segment, Sizes
from jaxtune.models.linear import Linear, apply_fused
from jaxtune.models.norm import Normed
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.gated import ACTIVATIONS, activated, gated_backward, mosaic, thin
from jaxtune.pallas.quant_matmul import gated_matmul, gated_mlp, joins, low_rank


@dataclasses.dataclass(frozen=True)
class MLPShape:
    """The settings of an MLP of another width than the decoder's, or beside or in place of experts."""

    intermediate_size: int  # how many numbers gate and up have for each token
    hf_name: str = "mlp"  # the part's name in Hugging Face's tensor names

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> MLP:
        """Builds the MLP with random weights. config: the decoder's. key: draws the weights. dtype: of the weights as
        stored.
        """
        return MLP(dataclasses.replace(config, intermediate_size=self.intermediate_size), key, dtype)


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) with gate_proj and up_proj, or one gate_up_proj, and down_proj."""

    order = BackwardOrder()

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        self.config = config
        keys = initial.split(key, 3)
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(k, in_size, out_size):
            return Linear(in_size, out_size, bias=config.mlp_bias, std=config.initializer_range, key=k, dtype=dtype)

        if config.fused_gate_up:
            self.gate_up_proj = linear(keys[0], hidden, 2 * inner)
        else:
            self.gate_proj = linear(keys[0], hidden, inner)
            self.up_proj = linear(keys[1], hidden, inner)
        self.down_proj = linear(keys[2], inner, hidden)

    def gate_up(self, x: jax.Array | Normed, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """x [B, T, hidden] -> (gate, up), each [B, T, intermediate], before the activation.

        key: draws the adapters' dropout masks; None: no dropout.
        """
        if self.config.fused_gate_up:
            gate_and_up = self.gate_up_proj(x, key)
            half = self.config.intermediate_size
            return gate_and_up[..., :half], gate_and_up[..., half:]
        gate, up = apply_fused(x, (self.gate_proj, self.up_proj), key)
        return gate, up

    def down(self, gate: jax.Array, up: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """down(activation(gate) * up), [B, T, hidden], with a derivative that needs little memory: gated_matmul's if
        down_proj has an adapter and nothing else that gated_matmul does not know, else that of `_down`.

          gate, up: [B, T, intermediate].
          key: draws the adapter's dropout mask; None: no dropout.
        """
        linear, activation = self.down_proj, self.config.activation
        if linear.clips is not None:  # whose gradient depends on its input, which `_down` does not keep
            return linear(ACTIVATIONS[activation](gate) * up, key)
        if linear.only_adapted(gate.dtype, key is not None):
            assert linear.lora is not None
            weight, bias = linear.stored_weight, None if linear.bias is None else linear.bias[...]
            lora = linear.lora.weights(weight)
            return gated_matmul(gate, up, weight, lora, bias, activation=activation, fp8=linear.fp8)
        run = functools.partial(_down, activation, *nnx.split(linear, nnx.Param, ...), gate, up, key)
        return low_rank.of_function(run)

    def segments(self) -> tuple[Segment, ...]:
        in_fp8 = self.down_proj.fp8  # then the product reads gate and up through e4m3, and their gradients too
        joined = Segment(
            "mlp",
            (INPUT, "gate", "up"),
            (Residual(OUTPUT),),
            lambda mlp, context, x, gate, up: (mlp.down_from_input(x, gate, up),),
            matrices=("gate_proj", "up_proj", "down_proj"),
        )
        return (
            Segment(
                "expand",
                (INPUT,),
                (Residual("gate", in_fp8=in_fp8), Residual("up", in_fp8=in_fp8)),
                lambda mlp, context, x: mlp.gate_up(x, context.key),
                matrices=("gate_up_proj",) if self.config.fused_gate_up else ("gate_proj", "up_proj"),
                separable=True,
                tokenwise=True,
                norms=True,
            ),
            Segment(
                "contract",
                ("gate", "up"),
                (Residual(OUTPUT),),
                lambda mlp, context, gate, up: (mlp.down(gate, up, context.key),),
                matrices=("down_proj",),
                tokenwise=True,
                joined_with_previous=joined if self._joins() else None,
            ),
        )

    def _joins(self) -> bool:
        """Whether gated_mlp differentiates `expand` and `contract` at once: FP8 with adapters and nothing else."""
        if self.config.fused_gate_up:
            return False
        linears = self.gate_proj, self.up_proj, self.down_proj
        plain = all(
            linear.fp8 and linear.compute is None and linear.only_adapted(None, drops=True) for linear in linears
        )
        return plain and joins(*(linear.stored_weight for linear in linears[:2]))

    def down_from_input(self, x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        """As `down`, with one derivative through all three linears to x. ValueError unless `_joins`.

        x: [B, T, hidden].
        gate, up: [B, T, intermediate], which `gate_up` returned for x; they get no gradients.
        """
        linears = self.gate_proj, self.up_proj, self.down_proj
        weights = [weight for linear in linears if isinstance(weight := linear.stored_weight, Stored)]
        loras = [linear.lora.weights(weight) for linear, weight in zip(linears, weights, strict=True) if linear.lora]
        biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
        return gated_mlp(x, gate, up, weights, loras, biases, activation=self.config.activation)

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        """The activation's output, gate and up if they are recomputed, and values of the residual stream, or where
        tokens are few, fewer of them beside a decoded down_proj.
        """
        dropped = sum(sizes[name] for name in ("gate", "up") if name in sizes.recomputed)
        stream, fit = sizes["layer_input"], self._fitted(sizes)
        values = max(fit.forward * stream, fit.forward_beside * stream + self._decoded_bytes(sizes))
        return sizes["gate"] + dropped + values

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """If a kernel overwrites gate and up with their gradients, `own` is the gradient of the activation's output,
        beside what
        the kernel's products with adapters need (`_joins`). Otherwise it is the activation's output, its gradient, the
        gradients
        of gate and up, and values of the residual stream; these numbers were fitted with the mixer's memory in them.
        `around`
        is gradients of the layer's other segments, and with the kernel at least a decoded down_proj, which is more than
        all else
        where tokens are few.
        """
        gate, up, stream = sizes["gate"], sizes["up"], sizes["layer_input"]
        fit = self._fitted(sizes)
        other_bytes = (fit.around if sizes.tiles == 1 else fit.around_tiles) * stream
        if self._in_place(sizes):  # the activation's gradient; the gradients of gate and up overwrite them
            if sizes.tiles == 1:
                other_bytes = max(other_bytes, fit.beside * stream + self._decoded_bytes(sizes))
            own_bytes = (gate + up) / 2
            if sizes.tiles == 1 and self._joins():
                # For each 128 of them codes in e4m3 and a float32 scale, and float32 products with the adapters' B's,
                # for each 128, or where gate and up were recomputed, 256, in another kernel that runs later.
                rank = max(linear.lora.rank for linear in (self.gate_proj, self.up_proj) if linear.lora is not None)
                apart = bool(sizes.recomputed & {"gate", "up"})
                rounded = (gate + up) / sizes.dtype.itemsize * (1 + 4 / 128 + 4 * rank / (256 if apart else 128))
                own_bytes = max(own_bytes, rounded) if apart else own_bytes + rounded
            return Scratch(own_bytes, other_bytes, covers_mixer=False)
        # The activation, its gradient, the gradients of gate and up, and partial gradients of other segments.
        return Scratch(2 * (gate + up) + fit.own * stream, other_bytes, covers_mixer=True)

    def _decoded_bytes(self, sizes: Sizes) -> float:
        weight = self.down_proj.stored_weight
        quantised = isinstance(weight, Stored) and not self.down_proj.fp8
        return float(weight.size * sizes.dtype.itemsize) if quantised else 0.0

    def _fitted(self, sizes: Sizes) -> MLPBytes:
        return MLP_BYTES.of("mosaic" if self._in_place(sizes) else "reference", sizes.device)

    def _in_place(self, sizes: Sizes) -> bool:
        """Whether a kernel of pallas/gated writes the gradients of gate and up over them; the reference needs more
        memory.
        """
        size, activation = self.config.intermediate_size, self.config.activation
        numbers = sizes["gate"] / sizes.dtype.itemsize
        linear = self.down_proj
        if linear.lora is not None and linear.only_adapted(sizes.dtype, drops=True):
            if thin.in_place(sizes.dtype, numbers / size, size, linear.lora.rank, activation):
                return True
        runs = mosaic.unsupported(sizes.dtype, sizes.length * size, activation) is None
        return runs and sizes.hopper and numbers < mosaic.MOST


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _down(activation: str, graph, trainable, frozen, gate, up, key, earlier_low_rank):
    """activation(gate) * up, multiplied by down_proj: ([B, T, hidden], the adapter's low-rank inputs).

    The backward needs three arrays of gate's size where the kernel runs, which overwrites what it reads; the reference
    up to six.
    """
    with low_rank.collected(earlier_low_rank) as low_rank_values:
        out = nnx.merge(graph, trainable, frozen)(activated(gate, up, activation), key)
    return out, tuple(low_rank_values)


def _down_fwd(activation, graph, trainable, frozen, gate, up, key, earlier_low_rank):
    results: tuple[jax.Array, tuple] = _down(activation, graph, trainable, frozen, gate, up, key, earlier_low_rank)
    return results, (trainable, frozen, gate, up, key, results[1])


def _down_bwd(activation, graph, residuals, gradients):
    """activation(gate) * up is computed again, because the forward does not keep it."""
    trainable, frozen, gate, up, key, low_rank_values = residuals
    dout, _ = gradients

    def linear(trainable, x):
        with low_rank.collected(low_rank_values):
            return nnx.merge(graph, trainable, frozen)(x, key)

    # A linear map's gradient to its input doesn't depend on the input, so gate can stand for the input, which isn't
    # computed until the next lines.
    _, to_input = jax.vjp(functools.partial(linear, trainable), gate)
    (dgated,) = to_input(dout)
    gated, dgate, dup = gated_backward(gate, up, dgated, activation)
    _, to_weights = jax.vjp(lambda trainable: linear(trainable, gated), trainable)
    return *to_weights(dout), None, dgate, dup, None, None


_down.defvjp(_down_fwd, _down_bwd)
