"""Numbers fitted to measurements, from which the time and memory of steps are forecast. Each table has an operation's
numbers by device and implementation, with their source; a device or implementation without numbers gets those of
another. Times of products and attention are relative to large matrix products on the same device, others to copies
within it. Bytes are multiples of the bytes that a comment names.

    ATTENTION_TIME.of("cudnn", "NVIDIA H200").backward
"""

from __future__ import annotations

import dataclasses

from jaxtune.pallas.fitted import Fitted

# ---- time


@dataclasses.dataclass(frozen=True)
class AttentionTime:
    """Duration of attention. A speed counts multiplications with keys that a query sees (causal mask and window)."""

    # the forward's speed for long documents, divided by the speed of a large matrix product on the same device
    share: float
    half_tokens: float  # the length of a document, in tokens, at which the forward has half its speed for long ones
    backward: float  # the duration of the backward, divided by that of the forward, for long documents
    # the length of a document, in tokens, at which the backward has half of its own speed for long documents
    half_tokens_backward: float
    # keys whose multiplication, for heads of 128, takes as long as what else each query of a windowed layer costs:
    # masked keys of its tiles, and their start and end
    window_keys: float
    # the duration with heads of at most 64, divided by that with heads of 128 and as many multiplications
    narrow: float


ATTENTION_TIME = Fitted(
    {
        ("H200", "cudnn"): (
            AttentionTime(
                share=0.936,
                half_tokens=1090,
                backward=2.87,
                half_tokens_backward=1365,
                window_keys=250,
                narrow=1.15,
            ),
            "steps of the 8B shape with rows of 2,048 to 65,536 tokens; windows of 128, heads of 64: attention.json, "
            "where they take 2.7 and 1.2 times as long, and profiles of gpt-oss-20b (54 ms of its attention, 53 here)",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class AttentionStage:
    """Duration of attention over whole rows, by which the stack distributes copies over a layer's segments.
    Multiplications are counted as for AttentionTime.
    """

    slower: float  # its forward's duration for long rows over that of products with as many multiplications
    half_tokens: float  # length of a row, in tokens, at which it takes twice as long per multiplication as in long ones
    backward: float  # duration of the backward over that of the forward


ATTENTION_STAGE = Fitted(
    {
        ("H200", "cudnn"): (
            AttentionStage(slower=1.15, half_tokens=1150, backward=2.9),
            "profiles of steps of the 8B shape with rows of 2,048 to 65,536 tokens",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class WideAttentionTime:
    """How many times as long attention with head dims above 256, another kernel, takes as narrower heads with as many
    multiplications.
    """

    forward: float  # the ratio of the durations of the forward
    backward: float  # the ratio of the durations of the backward


WIDE_ATTENTION_TIME = Fitted(
    {
        ("H200", "mosaic"): (
            WideAttentionTime(forward=1.3, backward=2.0),
            "heads of 512 and of 128, 8 rows of 2,048 tokens (1.17 and 1.98) and 2 of 8,192 (1.38 and 1.99)",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class DeltaRuleTime:
    """Time of the delta rule's kernels beyond their products, inputs and outputs: for each number in the values, the
    bytes that a copy within the device moves in that time.
    """

    forward: float  # of the forward
    backward: float  # of the backward, without recomputing the forward


DELTA_RULE_TIME = Fitted(
    {
        ("H200", "triton"): (
            DeltaRuleTime(forward=26.0, backward=82.0),
            "benchmarks/results/delta_rule.json: 16,384 tokens of a 9B take 0.52 ms forward, and 1.42 ms for the "
            "derivative alone",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class ProductTime:
    """Duration of matrix products and of what accompanies them."""

    half_tokens: float  # how many tokens a product needs to reach half of its speed for many tokens
    # how many times the inputs and outputs of a layer's segments are moved by everything that is not a product, in the
    # forward
    passes_forward: float
    passes_backward: float  # the same in the backward
    decoded_bytes: float  # bytes that are moved to decode one number of a quantised weight
    # the speed at which these bytes move, divided by that of a copy within the device; residuals are rounded to FP8 and
    # read again at the same speed
    decoded_share: float
    # the speed of experts' products, rows that pad tiles counted, divided by that of dense products
    experts: float
    # the rows of an expert from which on the kernel that decodes its weight while it multiplies hides a part of the
    # decoding: with twice as many rows it takes half as long
    beside_rows: float


PRODUCT_TIME = Fitted(
    {
        ("H200", "mosaic"): (
            ProductTime(
                half_tokens=64,
                passes_forward=2.0,
                passes_backward=2.2,
                decoded_bytes=2.5,
                decoded_share=0.8,
                experts=0.95,
                beside_rows=400,
            ),
            "steps of the 8B shape; experts: profiles of gpt-oss-20b and Qwen3-30B-A3B since aad446a8 "
            "(notes/planning.md)",
        )
    }
)


# How many times as long a product with a head in float32 takes as one in 16 bits, for the planner's forecast on Hopper
# GPUs; for others it takes the ratio from data sheets.
FLOAT32_HEAD_TIME = Fitted(
    {
        ("H200", "xla"): (
            5.0,
            "one product with the head of Llama-3.1-8B, as three in TF32: notes/linear_cross_entropy.md",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class ExpertGradientTime:
    """Duration of the products that compute gradients of experts' weights."""

    share: float  # the speed of the products, divided by that of dense ones
    # bytes moved to add the product of a tile of rows to the sum of its expert, for each number of the expert's weight
    sum_bytes: float


EXPERT_GRADIENT_TIME = Fitted(
    {
        ("H200", "mosaic"): (
            ExpertGradientTime(share=1.0, sum_bytes=0.0),
            "benchmarks/results/heads_and_expert_gradients_once.json: 0.86 to 0.97 of a dense product over the rows of "
            "tokens, which are 0.90 of those that are counted here",
        ),
        ("H200", "reference"): (
            ExpertGradientTime(share=0.75, sum_bytes=18.0),
            "the same record, gate_up of Qwen1.5-MoE: the product is written and read in float32, and the sum read and "
            "written",
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Numbers of a step that do not belong to one operation."""

    # seconds of kernel launches and gaps in a layer's forward; its backward has twice as many
    layer_seconds: float
    micro_batch_seconds: float  # seconds of launches and gaps in a micro-batch in addition to those of its layers
    # the share of the time of a layer's forward (or backward) during which transfers of residuals to and from the host,
    # or collectives, can run without prolonging it; these are hidden (models/placement/transfers.py)
    hidden: float
    lost: float  # the share of the time of transfers with the host by which they prolong the step even if hidden
    copy_seconds: float  # seconds of one copy of an optimizer's state, beyond those of its bytes
    # the share of a collective's time by which it prolongs the step at the least, because NCCL's kernels use
    # multiprocessors and products lose that time
    collective_lost: float
    logit_bytes: float  # bytes that the loss moves for each logit, forward and backward
    # bytes that the gradient sum of a trained head moves for each of its numbers in each chunk
    head_gradient_bytes: float
    # seconds in which the host launches a layer of a micro-batch, forward and backward
    host_layer_seconds: float
    host_micro_batch_seconds: float  # seconds of the host for a micro-batch, in addition to those of its layers
    host_step_seconds: float  # seconds of the host for a step, in addition to those of its micro-batches


STEP_TIME = Fitted(
    {
        ("H200", "xla"): (
            StepTime(
                layer_seconds=40e-6,
                micro_batch_seconds=2.5e-3,
                hidden=0.9,
                lost=0.03,
                copy_seconds=10e-6,
                collective_lost=0.95,
                logit_bytes=18.0,
                head_gradient_bytes=8.0,
                host_layer_seconds=0.2e-3,
                host_micro_batch_seconds=2e-3,
                host_step_seconds=2e-3,
            ),
            "steps of the 8B shape; collectives: fsdp over two H200s, where an 8B LoRA takes 44 ms more a step than on "
            "one, for 15 GB gathered (44 ms at 0.75 of NVLink's rate); copy_seconds is assumed; micro-batch: 135M and "
            "0.6B at 2,560 to 16,384 tokens and an 8B at dbfe89e6, 0.95 to 1.06 of the speed; host: at most the 11.3 "
            "ms of a 135M's steps of 5 x 512 tokens, of 30 layers, at cd5f400a; how layer, micro-batch and step share "
            "them is assumed",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class DeviceShares:
    """Shares of a rate that a device sustains, from 0 to 1. The first four multiply the rates of data sheets. Where
    rates were measured, products get `sustained` instead, copies no factor; collectives always get `peers` times the
    data sheet.
    """

    products: float  # of matrix products
    copies: float  # of copies within the device
    link: float  # of copies to and from pinned host memory
    peers: float  # of collectives, over NVLink or the host link
    sustained: float  # speed of products in a whole step over their speed in a short measurement; power is the limit


DEVICE_SHARES = Fitted(
    {
        ("H200", "xla"): (
            DeviceShares(products=680 / 989, copies=4.2 / 4.8, link=55 / 63, peers=0.75, sustained=0.93),
            "680 of 989 TFLOP/s, copies at 4.2 of 4.8 TB/s, 55 of 63 GB/s to the host; the peers' share is assumed",
        )
    }
)


# ---- bytes of programs compiled for an H200, unless a source says otherwise


@dataclasses.dataclass(frozen=True)
class AttentionBytes:
    """Memory of attention in its layer's backward, in multiples of the bytes of the query (all heads) or the layer's
    input.
    """

    # of the query: results of attention that exist already while the feed-forward's backward runs, before attention's
    # own; counted only if the feed-forward's estimate includes the mixer's memory (Scratch.covers_mixer)
    waiting: float
    stream: float  # of the layer's input: values of the residual stream that exist during attention's backward
    # of the query: the work space of attention's kernel in the backward, counted only if layers run in tiles of tokens;
    # otherwise other values of the layer are larger
    work_space: float


ATTENTION_BYTES = Fitted(
    {
        ("H200", "cudnn"): (
            AttentionBytes(waiting=0.7, stream=2.2, work_space=4.0),
            "compiled steps; the work space, gradients of the query in float32 and of key and value for each of its "
            "heads, by one step of 350,208 tokens: 3.5 to 3.9 times the query",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class DeltaNetBytes:
    """Memory of the gated delta net in its layer's backward, in multiples of the bytes of its output (all heads'
    values) or the layer's input.
    """

    waiting: float  # of its output: results of the net that are counted as AttentionBytes.waiting is
    stream: float  # of the layer's input: values of the residual stream that exist during the net's backward


DELTA_NET_BYTES = Fitted(
    {("H200", "triton"): (DeltaNetBytes(waiting=0.7, stream=2.2), "taken to be as attention's: not measured")}
)


@dataclasses.dataclass(frozen=True)
class MLPBytes:
    """Memory of an MLP beyond the residuals, in multiples of the bytes of the layer's input. "mosaic" stands for the
    kernels that overwrite gate and up with their gradients.
    """

    forward: float  # temporary values at the end of the layer's forward
    forward_beside: float  # the same beside a quantised down_proj, which is decoded to be multiplied by
    own: float  # further values of the MLP's own backward, beside the activation and the gradients; not of "mosaic"
    around: float  # partial gradients of the layer's other segments during the MLP's backward, if it runs whole
    beside: float  # the same beside a decoded down_proj; only of "mosaic", where that makes the peak
    around_tiles: float  # the same if the MLP runs in tiles


MLP_BYTES = Fitted(
    {
        ("H200", "mosaic"): (
            MLPBytes(forward=1.9, forward_beside=0.3, own=0.0, around=1.6, beside=1.0, around_tiles=2.0),
            "compiled steps",
        ),
        ("H200", "reference"): (
            MLPBytes(forward=1.9, forward_beside=0.3, own=0.6, around=0.0, beside=0.0, around_tiles=0.2),
            "compiled steps",
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class ExpertsBytes:
    """Memory of a mixture of experts beyond the residuals, in multiples of the bytes of the array that a field's
    comment names. Sorted rows have a token's hidden state once for each of its experts; gate_up is the output of the
    gate and up products. The backward peaks when the activation's gradients are computed, or those of the sorted rows.
    "mosaic" is for products that gather rows themselves, without `rows_beside`, `rows_again` and `decoded`.
    """

    forward: float  # of the layer's input: temporary values at the end of the layer's forward
    own: float  # of the layer's input: further values of the backward, at both moments
    gate_up: float  # of gate_up: values at the first moment
    rows: float  # of the sorted rows: values at the second moment
    rows_beside: float  # of the sorted rows: further values at the first moment
    rows_again: float  # of the sorted rows: values at the second moment if the backward recomputes gate_up
    # of the experts' largest quantised weight in the compute dtype: that weight, decoded, at the second moment
    decoded: float


_EXPERTS = ExpertsBytes(forward=2.9, own=0.6, gate_up=0.95, rows=1.15, rows_beside=0.0, rows_again=0.0, decoded=0.0)
EXPERTS_BYTES = Fitted(
    {
        ("H200", "mosaic"): (_EXPERTS, "compiled steps of Qwen3-30B-A3B and gpt-oss-20b: products gather rows"),
        ("H200", "reference"): (
            dataclasses.replace(_EXPERTS, rows=0.85, rows_beside=1.25, rows_again=1.5, decoded=1.0),
            "compiled steps of the same with decoded weights: rows are sorted before products",
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class AllocatorBytes:
    """Memory of values on their way to the host and around the loss: XLA's allocator takes more than their bytes.
    Multiples of the bytes that a comment names.
    """

    # of the bytes of values that are being copied to the host: those values with the gaps that they leave in memory
    leaving: float
    # of the bytes of offloaded residuals no larger than the layer's input: gaps between them, and between what comes
    # back of the next layer, at an MLP's backward
    arriving: float
    # of the bytes of the final hidden states: values that exist around the loss, beside the logits, if it has several
    # chunks, each of which writes its gradient of the hidden states over them
    loss: float


ALLOCATOR_BYTES = Fitted(
    {
        ("H200", "xla"): (
            AllocatorBytes(leaving=1.4, arriving=0.4, loss=2.5),
            "compiled steps; arriving: of an 8B with two to eight micro-batches",
        )
    }
)
