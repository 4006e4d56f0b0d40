"""The numbers of the planner and of the stack that were fitted to measurements and not derived from shapes.

A table holds the numbers of one operation, by the device and by the implementation (a name that `pallas/dispatch.py`
gives) they were fitted to, each with its source (jaxtune/pallas/fitted.py). Numbers that belong to one format of
weights are in its declaration.

    ATTENTION_TIME.of("cudnn", "NVIDIA H200").backward

Times compare an operation with large products on the same device, whose rates `train/planning/devices.py` has. Bytes
are multiples of a layer's values. How well both hold, tests/gpu/aot/test_memory.py checks of compiled programs, and
benchmarks/train records of the device.
"""

from __future__ import annotations

import dataclasses

from jaxtune.pallas.fitted import Fitted

# ---- time


@dataclasses.dataclass(frozen=True)
class AttentionTime:
    # The share of a large product's speed that long documents reach.
    share: float
    # Tokens of a document at which the forward reaches half of that.
    half_tokens: float
    # How many times as long as the forward the backward takes at long documents.
    backward: float
    # Tokens of a document at which the backward reaches half of its speed.
    half_tokens_backward: float


ATTENTION_TIME = Fitted(
    {
        ("H200", "cudnn"): (
            AttentionTime(share=0.936, half_tokens=1090, backward=2.87, half_tokens_backward=1365),
            "steps of the 8B shape with rows of 2,048 to 65,536 tokens",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class AttentionStage:
    """How long attention over whole rows takes, as the stack sees it, which spreads copies under it."""

    # How many times as long as products with as many multiplications it takes at long rows.
    slower: float
    # Tokens of a row at which it takes twice as long.
    half_tokens: float
    # How many times as long as the forward the backward takes.
    backward: float


ATTENTION_STAGE = Fitted(
    {
        ("H200", "cudnn"): (
            AttentionStage(slower=1.15, half_tokens=1150, backward=2.9),
            "profiles of steps of the 8B shape with rows of 2,048 to 65,536 tokens",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class DeltaRuleTime:
    """Bytes that a copy within the device moves while the kernels compute, beside their products and what they read
    and write, for each number of a token's values."""

    forward: float
    backward: float


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
    # Tokens at which a product reaches half of its speed.
    half_tokens: float
    # How many times everything that is not a product moves a segment's inputs and outputs.
    passes_forward: float
    passes_backward: float
    # Bytes moved to decode a number of a packed weight, and the share of a copy's speed at which they move.
    decoded_bytes: float
    decoded_share: float
    # The share of dense products' speed that experts' products reach, with what sorts their rows.
    experts: float


PRODUCT_TIME = Fitted(
    {
        ("H200", "mosaic"): (
            ProductTime(
                half_tokens=64,
                passes_forward=2.0,
                passes_backward=2.2,
                decoded_bytes=2.5,
                decoded_share=0.8,
                experts=0.75,
            ),
            "steps of the 8B shape; experts: three steps of gpt-oss-20b",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class StepTime:
    # Seconds of launches and gaps of a layer in one direction, and of a micro-batch.
    layer_seconds: float
    micro_batch_seconds: float
    # The share of a layer's time in one direction under which transfers (models/placement/transfers.py) can hide, and
    # the share of the transfers' time that is lost even then.
    hidden: float
    lost: float
    # The part of a collective's time that products lose while it runs: NCCL's kernels take multiprocessors.
    collective_lost: float
    # Bytes moved for each logit by the loss, and by a trained head's gradient sum for each of its numbers and chunk.
    logit_bytes: float
    head_gradient_bytes: float


STEP_TIME = Fitted(
    {
        ("H200", "xla"): (
            StepTime(
                layer_seconds=40e-6,
                micro_batch_seconds=6e-3,
                hidden=0.9,
                lost=0.03,
                collective_lost=0.95,
                logit_bytes=18.0,
                head_gradient_bytes=8.0,
            ),
            "steps of the 8B shape; collectives: fsdp over two H200s, where an 8B LoRA takes 44 ms more a step than on "
            "one, for 15 GB gathered (44 ms at 0.75 of NVLink's rate)",
        )
    }
)


@dataclasses.dataclass(frozen=True)
class DeviceShares:
    """Shares of a data sheet's rates that a device reaches for long."""

    products: float
    copies: float
    # Of pinned host memory.
    link: float
    # Of NVLink or the host link, by collectives.
    peers: float
    # Of a product's speed in a short measurement, for a whole step: the limit is power.
    sustained: float


DEVICE_SHARES = Fitted(
    {
        ("H200", "xla"): (
            DeviceShares(products=680 / 989, copies=4.2 / 4.8, link=55 / 63, peers=0.75, sustained=0.93),
            "680 of 989 TFLOP/s, copies at 4.2 of 4.8 TB/s, 55 of 63 GB/s to the host; the peers' share is assumed",
        )
    }
)


# ---- bytes: of programs compiled for an H200, unless a source says otherwise


@dataclasses.dataclass(frozen=True)
class AttentionBytes:
    # Of the query: what is half ready while the feed-forward's backward runs.
    waiting: float
    # Of the layer's input: what of the residual stream is beside the backward.
    stream: float
    # Of the query: the backward's work space, where layers run in tiles and nothing is larger.
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
    # Of the output: what is half ready while the feed-forward's backward runs.
    waiting: float
    # Of the layer's input: what of the residual stream is beside the backward.
    stream: float


DELTA_NET_BYTES = Fitted(
    {("H200", "triton"): (DeltaNetBytes(waiting=0.7, stream=2.2), "taken to be as attention's: not measured")}
)


@dataclasses.dataclass(frozen=True)
class MLPBytes:
    """Multiples of the layer's input."""

    # At the end of the forward.
    forward: float
    # In the backward, of the feed-forward's own.
    own: float
    # Around the backward: half-ready gradients, where layers run whole and in tiles.
    around: float
    around_tiles: float


MLP_BYTES = Fitted(
    {
        ("H200", "mosaic"): (MLPBytes(forward=2.9, own=0.0, around=1.6, around_tiles=2.0), "compiled steps"),
        ("H200", "reference"): (MLPBytes(forward=2.9, own=0.6, around=0.0, around_tiles=0.2), "compiled steps"),
    }
)


@dataclasses.dataclass(frozen=True)
class ExpertsBytes:
    # Of the layer's input: at the end of the forward, and in the backward of the feed-forward's own.
    forward: float
    own: float
    # Of the rows sorted by expert: beside gradients of gate_up; beside twice gate_up; and where gate_up runs again.
    rows: float
    rows_beside: float
    rows_again: float
    # Of the largest weight in the compute dtype, where it is decoded.
    decoded: float


_EXPERTS = ExpertsBytes(forward=2.9, own=0.6, rows=1.3, rows_beside=0.0, rows_again=0.0, decoded=0.0)
EXPERTS_BYTES = Fitted(
    {
        ("H200", "mosaic"): (_EXPERTS, "compiled steps of Qwen3-30B-A3B and gpt-oss-20b: products bring rows"),
        ("H200", "reference"): (
            dataclasses.replace(_EXPERTS, rows=1.0, rows_beside=1.25, rows_again=2.05, decoded=1.1),
            "compiled steps of the same with decoded weights: rows are sorted before products",
        ),
    }
)


@dataclasses.dataclass(frozen=True)
class AllocatorBytes:
    # Of values on their way to the host, with the gaps that they leave behind.
    leaving: float
    # Of the hidden states: what is around the loss.
    loss: float


ALLOCATOR_BYTES = Fitted(
    {
        ("H200", "xla"): (
            AllocatorBytes(leaving=1.4, loss=3.5),
            "compiled steps",
        )
    }
)
