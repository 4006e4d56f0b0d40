"""The gated MLP, a feed-forward: down(activation(gate(x)) * up(x)). `MLP` is the module. MLPShape has the width of one
that a layer names itself instead of taking the decoder's feed-forward. `_down`, its second half where gated_matmul
cannot compute it, has a hand-written derivative that needs less memory than jax.vjp's."""

from __future__ import annotations

import dataclasses
import functools

import jax
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import MLP_BYTES, MLPBytes
from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Residual, Scratch, Segment, Sizes
from jaxtune.models.linear import Linear, apply_fused
from jaxtune.models.norm import Normed
from jaxtune.pallas.formats import Stored
from jaxtune.pallas.gated import ACTIVATIONS, gated_backward, mosaic, thin
from jaxtune.pallas.quant_matmul import gated_matmul, gated_mlp, joins, low_rank


@dataclasses.dataclass(frozen=True)
class MLPShape:
    """The settings of an MLP that is not simply the decoder's feed-forward, given as Part.config; `make` builds the
    module. Families use it where layers have MLPs of several widths, where some layers of a model with experts have an
    MLP instead, and where a layer has an MLP beside its experts."""

    intermediate_size: int  # how many numbers gate and up have for each token
    hf_name: str = "mlp"  # the part's name in Hugging Face's tensor names

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> MLP:
        """Builds the MLP of this width; Block's constructor calls it. config: the decoder's, for all other settings.
        key: draws the initial weights. dtype: of the weights."""
        return MLP(dataclasses.replace(config, intermediate_size=self.intermediate_size), key, dtype)


class MLP(nnx.Module):
    """The gated MLP, down(activation(gate(x)) * up(x)), with the matrices gate_proj and up_proj, or one gate_up_proj,
    and down_proj.

    `segments` divides its computation into the steps that the stack runs forward and backward, and whose results a plan
    keeps, offloads or recomputes. It is the usual feed-forward of a model without experts, and the shared expert of a
    MoE. `order` has settings of the stack's backward (BackwardOrder): here a recomputed step runs once more when its
    gradient arrives, and the backward of a step waits for the weight gradients of later ones. `forward_bytes` and
    `backward_bytes` are the planner's estimates of its memory.

    Args:
      config: gives the sizes, the activation, and whether matrices are fused and have biases.
      key: draws the initial weights.
      dtype: of the weights.
    """

    order = BackwardOrder()

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        self.config = config
        keys = jax.random.split(key, 3)
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(k, in_size, out_size):
            """A Linear of these sizes, whose initial weight k draws."""
            return Linear(in_size, out_size, bias=config.mlp_bias, std=config.initializer_range, key=k, dtype=dtype)

        if config.fused_gate_up:
            self.gate_up_proj = linear(keys[0], hidden, 2 * inner)
        else:
            self.gate_proj = linear(keys[0], hidden, inner)
            self.up_proj = linear(keys[1], hidden, inner)
        self.down_proj = linear(keys[2], inner, hidden)

    def gate_up(self, x: jax.Array | Normed, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Multiplies x [B, T, hidden] by the gate and up matrices: (gate, up), each [B, T, intermediate], before the
        activation. The segment `expand` calls it, and a MoE for its shared expert. key: draws the adapters' dropout
        masks; None: no dropout."""
        if self.config.fused_gate_up:
            both = self.gate_up_proj(x, key)
            half = self.config.intermediate_size
            return both[..., :half], both[..., half:]
        gate, up = apply_fused(x, (self.gate_proj, self.up_proj), key)
        return gate, up

    def down(self, gate: jax.Array, up: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Computes the MLP's output down(activation(gate) * up), [B, T, hidden], from gate and up [B, T, intermediate],
        which are from `gate_up`, with a derivative that needs little memory: that of gated_matmul, if down_proj has an
        adapter and nothing else that gated_matmul does not know (Linear.only_adapted), else that of `_down`. The
        segment `contract` calls it, and a MoE for its shared expert.

        key: draws the dropout mask of down_proj's adapter; None: no dropout."""
        linear, activation = self.down_proj, self.config.activation
        if linear.only_adapted(gate.dtype, key is not None):
            assert linear.lora is not None
            weight, bias = linear.stored_weight, None if linear.bias is None else linear.bias[...]
            lora = linear.lora.weights(weight)
            return gated_matmul(gate, up, weight, lora, bias, activation=activation, fp8=linear.fp8)
        run = functools.partial(_down, activation, *nnx.split(linear, nnx.Param, ...), gate, up, key)
        return low_rank.of_function(run)

    def segments(self) -> tuple[Segment, ...]:
        """Its two segments in the order in which they run: `expand` (gate and up) and `contract` (activation and down
        projection); both are tokenwise, so that they can run over tiles. They tell the stack how to run the MLP and the
        planner what it costs."""
        in_fp8 = self.down_proj.fp8  # then the product reads gate and up through e4m3, and their gradients too
        whole = Segment(
            "mlp",
            (INPUT, "gate", "up"),
            (Residual(OUTPUT),),
            lambda mlp, context, x, gate, up: (mlp.whole(x, gate, up),),
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
                with_before=whole if self._joins() else None,
            ),
        )

    def _joins(self) -> bool:
        """Whether the backward differentiates `expand` and `contract` at once, by gated_mlp: where all three matrices
        have adapters and nothing else (Linear.only_adapted), and the weights of gate and up join."""
        if self.config.fused_gate_up:
            return False
        linears = self.gate_proj, self.up_proj, self.down_proj
        plain = all(each.fp8 and each.compute is None and each.only_adapted(None, drops=True) for each in linears)
        return plain and joins(*(each.stored_weight for each in linears[:2]))

    def whole(self, x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
        """`down` of what `gate_up` returned of x [B, T, hidden], with the derivative of both. The backward calls it if
        `_joins`."""
        linears = self.gate_proj, self.up_proj, self.down_proj
        weights = [weight for linear in linears if isinstance(weight := linear.stored_weight, Stored)]
        loras = [linear.lora.weights(weight) for linear, weight in zip(linears, weights, strict=True) if linear.lora]
        biases = [None if linear.bias is None else linear.bias[...] for linear in linears]
        return gated_mlp(x, gate, up, weights, loras, biases, activation=self.config.activation)

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes in memory at the end of the layer's forward in addition to the residuals, for the
        planner's forecasts of a training step's forward and of passes without a backward.

        It counts the activation's output, those of gate and up that are recomputed in the backward instead of kept, and
        values of the residual stream, a multiple of the layer's input (models/fitted.py), or, where tokens are few, a
        smaller multiple beside a quantised down_proj that is decoded. sizes: the bytes of the
        layer's residuals by name, the names of the recomputed ones, and what `_fitted` reads."""
        dropped = sum(sizes[name] for name in ("gate", "up") if name in sizes.recomputed)
        stream, fit = sizes["layer_input"], self._fitted(sizes)
        values = max(fit.forward * stream, fit.forward_beside * stream + self._decoded_bytes(sizes))
        return sizes["gate"] + dropped + values

    def backward_bytes(self, sizes: Sizes) -> Scratch:
        """An estimate of the bytes that the MLP's backward needs in addition to the residuals, for the planner's
        forecast of the peak.

        If a kernel overwrites gate and up with their gradients (`_in_place`), `own` of the result is the gradient of
        the activation's output, beside the rounded gradients of gate and up and the partial sums of their products with
        adapters if the kernel computes these (`_joins`), or these alone if a later kernel does and they are more;
        covers_mixer is False: the mixer's memory is counted on its own. Otherwise `own` is the activation's output, its
        gradient, the gradients of gate and up, and a multiple of the layer's input for values of the residual stream;
        covers_mixer is True, because these numbers include the mixer's memory.

        `around` is another multiple of the layer's input, for gradients of the layer's other segments (the functions in
        which its parts run) that are in memory at the same time. With the kernel it has at least the whole
        matrix of a quantised down_proj, decoded to be multiplied by: more than all else where tokens are few. The
        multiples are in models/fitted.py. sizes: the bytes of the layer's residuals by name, the number of tiles, and
        what `_fitted` reads.
        """
        gate, up, stream = sizes["gate"], sizes["up"], sizes["layer_input"]
        fit = self._fitted(sizes)
        around = (fit.around if sizes.tiles == 1 else fit.around_tiles) * stream
        if self._in_place(sizes):  # the activation's gradient; the gradients of gate and up overwrite them
            if sizes.tiles == 1:
                around = max(around, fit.beside * stream + self._decoded_bytes(sizes))
            own = (gate + up) / 2
            if sizes.tiles == 1 and self._joins():
                # For each 128 of them codes in e4m3 and a float32 scale, and float32 products with the adapters' B's,
                # for each 128, or where gate and up were recomputed, 256, in another kernel that runs later.
                rank = max(each.lora.rank for each in (self.gate_proj, self.up_proj) if each.lora is not None)
                apart = bool(sizes.recomputed & {"gate", "up"})
                rounded = (gate + up) / sizes.dtype.itemsize * (1 + 4 / 128 + 4 * rank / (256 if apart else 128))
                own = max(own, rounded) if apart else own + rounded
            return Scratch(own, around, covers_mixer=False)
        # The activation, its gradient, the gradients of gate and up, and partial gradients of other segments.
        return Scratch(2 * (gate + up) + fit.own * stream, around, covers_mixer=True)

    def _decoded_bytes(self, sizes: Sizes) -> float:
        """The bytes of down_proj's weight, decoded to the compute dtype for a product, which counts in the forward and
        in the backward; 0 if it is not quantised, or multiplied in FP8 as it is stored. sizes: has the compute
        dtype."""
        weight = self.down_proj.stored_weight
        quantised = isinstance(weight, Stored) and not self.down_proj.fp8
        return float(weight.size * sizes.dtype.itemsize) if quantised else 0.0

    def _fitted(self, sizes: Sizes) -> MLPBytes:
        """The fitted coefficients by which the planner estimates this layer's scratch memory, as multiples of the bytes
        of the layer's input: an entry of MLP_BYTES (models/fitted.py).

        They depend on the device and on which implementation of the activation's gradient runs for these sizes: the
        kernel that works in place, or the reference (`_in_place`). sizes: the bytes of the layer's residuals by name,
        and the compute dtype, the tokens of a row and the device."""
        return MLP_BYTES.of("mosaic" if self._in_place(sizes) else "reference", sizes.device)

    def _in_place(self, sizes: Sizes) -> bool:
        """Whether the planner expects a kernel of pallas/gated to compute the activation's gradient for these sizes,
        which writes the gradients of gate and up over gate and up; otherwise the reference implementation runs, which
        needs more memory. True on every GPU where gated_matmul multiplies by down_proj and its kernel supports the
        call, and on a Hopper GPU for shapes, dtypes and activations that the other kernel supports and fewer than 2^32
        numbers of gate. sizes: the bytes of `gate` among the layer's residuals, with the compute dtype, the tokens of a
        row, and whether the device is a Hopper GPU."""
        size, activation = self.config.intermediate_size, self.config.activation
        numbers = sizes["gate"] / sizes.dtype.itemsize
        linear = self.down_proj
        if linear.lora is not None and linear.only_adapted(sizes.dtype, drops=True):
            if thin.in_place(sizes.dtype, numbers / size, size, linear.lora.rank, activation):
                return True
        runs = mosaic.unsupported(sizes.dtype, sizes.length * size, activation) is None
        return runs and sizes.hopper and numbers < mosaic.MOST


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _down(activation: str, graph, trainable, frozen, gate, up, key, given):
    """activation(gate) * up, multiplied by the linear (down_proj) that nnx.merge builds from graph, trainable and
    frozen: ([B, T, hidden], the adapter's low-rank inputs). MLP.down calls it where down_proj is trained, has no
    adapter, or has one with dropout or DoRA, or in quantisation-aware training.

    Its backward needs three arrays of gate's size, if the kernel of pallas/gated runs (MLP._in_place): gate, up and the
    gradient of activation(gate) * up. Over these three the kernel writes its three results: the gradients of gate and
    up, and activation(gate) * up itself, which down_proj's trained tensors need for their gradients. The reference
    implementation needs up to six.

    Args:
      activation: a key of ACTIVATIONS, such as "silu".
      graph, trainable, frozen: the linear, from nnx.split(linear, nnx.Param, ...).
      gate, up: [B, T, intermediate].
      key: draws the adapter's dropout mask; None: no dropout.
      given: the low-rank inputs that an earlier run made (pallas/quant_matmul/low_rank.py); None: they are computed.
    """
    with low_rank.kept(given) as made:
        out = nnx.merge(graph, trainable, frozen)(ACTIVATIONS[activation](gate) * up, key)
    return out, tuple(made)


def _down_fwd(activation, graph, trainable, frozen, gate, up, key, given):
    """The forward rule of `_down`: (its results, the residuals (trainable, frozen, gate, up, key, low-rank inputs) for
    `_down_bwd`). activation: a key of ACTIVATIONS. graph, trainable, frozen: the linear down_proj, from nnx.split.
    gate, up: [B, T, intermediate]. key: draws the adapter's dropout mask, or None. given: low-rank inputs, or None."""
    results: tuple[jax.Array, tuple] = _down(activation, graph, trainable, frozen, gate, up, key, given)
    return results, (trainable, frozen, gate, up, key, results[1])


def _down_bwd(activation, graph, residuals, gradients):
    """The backward rule of `_down`: (gradients of trainable, None for frozen, gradients of gate and up, None for key
    and for the low-rank inputs).

    It computes activation(gate) * up again, because the forward does not keep it. activation, graph: the static
    arguments of `_down`, a key of ACTIVATIONS and the linear's structure. residuals: from `_down_fwd`. gradients: of
    both results, of which that of the output [B, T, hidden] is used."""
    trainable, frozen, gate, up, key, made = residuals
    dout, _ = gradients

    def linear(trainable, x):
        """The linear with these trainable tensors, applied to x, whose low-rank inputs are there already."""
        with low_rank.kept(made):
            return nnx.merge(graph, trainable, frozen)(x, key)

    # A linear map's gradient to its input doesn't depend on the input, so gate can stand for the input, which isn't
    # computed until the next lines.
    _, to_input = jax.vjp(functools.partial(linear, trainable), gate)
    (dgated,) = to_input(dout)
    gated, dgate, dup = gated_backward(gate, up, dgated, activation)
    _, to_weights = jax.vjp(lambda trainable: linear(trainable, gated), trainable)
    return *to_weights(dout), None, dgate, dup, None, None


_down.defvjp(_down_fwd, _down_bwd)
