"""Forecasts of one layer's bytes and seconds under many plans at once. Bytes of residuals are exact; what the compiler
adds, and the rates, are fitted (models/fitted.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxtune.models.fitted import ALLOCATOR_BYTES, ATTENTION_TIME, PRODUCT_TIME, STEP_TIME, ProductTime, StepTime
from jaxtune.models.layers.segment import Sizes
from jaxtune.models.stack.residual_plan import PLACEMENTS, LayerPlan
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.layer_costs import LayerKind, Work
from jaxtune.train.planning.parts import Shape, StepParts

type Figure = Any  # a float, or an array of floats, one for each plan


@dataclasses.dataclass(frozen=True)
class LayerForecast:
    """Bytes and seconds of one layer for one micro-batch: means over the layers, but the largest kind's in
    `work_forward` and `work`. Fields are floats, or arrays with a value for each plan.
    """

    kept: Figure  # bytes on the device from forward to backward
    hosted: Figure  # bytes on the host from forward to backward
    leaving: Figure  # part of `hosted` still being copied at the MLP of the next layer's forward
    arriving: Figure  # part of `hosted` being copied back already at the MLP of the next layer's backward
    work_forward: Figure  # device bytes at the end of its forward, in addition to `kept`
    work: Figure  # device bytes in its backward, in addition to `kept`, if the next layer has the same plan
    forward: Figure  # seconds, with waits
    backward: Figure  # seconds, with recomputation and waits
    recompute: Figure  # the part of the seconds that recomputes residuals
    wait: Figure  # the part of the seconds that waits for the host link
    row_backward: Figure  # `backward` if each row is one document

    def at(self, index: Any) -> LayerForecast:
        return LayerForecast(*(array[index] for array in vars(self).values()))


def product_time(device: Device) -> ProductTime:
    """Fitted numbers that predict seconds of matrix products on `device`."""
    return PRODUCT_TIME.of("mosaic", device.name)


def step_time(device: Device) -> StepTime:
    """Fitted numbers of a step's overheads, such as kernel launches. An unmeasured device gets the first one's."""
    return STEP_TIME.of("xla", device.name)


def bytes_with_gaps(leaving: Figure, device: Device) -> Figure:
    """Device bytes of values that leave for the host, with their gaps in the allocator's memory."""
    return ALLOCATOR_BYTES.of("xla", device.name).leaving * leaving


def _decode_seconds(work: Work, tokens: float, device: Device, devices: int) -> float:
    """Seconds to decode quantised weights once. On several devices no kernel decodes while it multiplies."""
    fit = product_time(device)
    numbers = work.decoded_numbers(tokens, fit.beside_rows if device.hopper and devices == 1 else math.inf)
    return numbers * fit.decoded_bytes / (device.copy * fit.decoded_share)


def _attention_seconds(work: Work, tokens: float, shape: Shape, device: Device, rows: bool) -> tuple[float, float]:
    """(forward, backward). rows: as if each were one document."""
    fit, document = ATTENTION_TIME.of("cudnn", device.name), shape.length if rows else shape.document
    flops = work.row_attention_flops if rows else work.attention_flops
    flops_backward = work.row_attention_flops_backward if rows else work.attention_flops_backward
    rate = device.gemm * fit.share
    forward, backward = flops * tokens / rate, flops_backward * fit.backward * tokens / rate
    return forward * (1 + fit.half_tokens / document), backward * (1 + fit.half_tokens_backward / document)


def _segment_seconds(
    work: Work, tokens: float, shape: Shape, device: Device, rows: bool = False
) -> tuple[float, float, float]:
    """Seconds of a segment's (forward, backward without recomputation, recomputation). rows: attention is over whole
    ones.
    """
    fit, devices = product_time(device), shape.devices
    rate = device.gemm * tokens / (tokens + fit.half_tokens)
    weights = work.weight_bytes / device.copy
    product = max(work.flops * tokens / rate, weights) + work.empty_flops / device.gemm
    product /= fit.experts if work.empty_flops else 1.0
    decoding = _decode_seconds(work, tokens, device, devices)
    attention, attention_backward = _attention_seconds(work, tokens, shape, device, rows)
    passes = work.moved_bytes * tokens / device.copy
    forward = product + decoding + attention
    forward += fit.passes_forward * passes + work.kernel_forward * tokens / device.copy
    not_again = work.written_bytes + (work.row_bytes if device.hopper and not work.decoded else 0.0)
    again = forward - fit.passes_forward * not_again * tokens / device.copy
    backward = product + decoding + attention_backward
    backward += fit.passes_backward * passes + work.kernel_backward * tokens / device.copy
    backward += work.weight_flops * tokens / rate + work.expert_gradient_seconds(tokens, rate, device)
    return forward, backward, again


def layer_forecast(
    costs: StepParts, plan: LayerPlan, tokens: float, device: Device, tile_tokens: int | None = None
) -> LayerForecast:
    """The forecast of the mean layer under one plan, as floats; see `layer_forecasts`. tokens: of a micro-batch on one
    device, perhaps a fraction. tile_tokens: of a tile of MLPs; None: no tiles.
    """
    placed = np.asarray([[PLACEMENTS.index(plan.of(residual)) for residual in costs.layers.all_residuals]])
    return LayerForecast(*map(float, vars(layer_forecasts(costs, placed, tokens, device, tile_tokens).at(0)).values()))


def layer_forecasts(
    costs: StepParts, placed: np.ndarray, tokens: float, device: Device, tile_tokens: int | None
) -> LayerForecast:
    """Forecasts of the mean layer under many plans, as arrays [plans].

    placed: int[plans, residuals], indices into PLACEMENTS.
    tokens: of a micro-batch on one device.
    tile_tokens: of a tile of MLPs, under plans that recompute all of Layers.tiled; None: no tiles.
    """
    mean_sizes = {name: costs.layers.residual_bytes(name, tokens) for name in costs.layers.residuals}
    of_kinds = [{name: kind.residual_bytes(name, tokens) for name in kind.residuals} for kind in costs.layers.kinds]
    most_tiles = 1 if tile_tokens is None or not costs.layers.tiled else costs.shape.length // tile_tokens

    def segment_seconds(tiles: int, rows: bool = False) -> list[tuple[float, float, float]]:
        """`_segment_seconds` of each segment, if those that need no whole rows run over tiles."""
        seconds = []
        for segment in costs.layers.segments:
            work = segment.work
            if segment.tokenwise:  # its weights are read and decoded for every tile
                work = dataclasses.replace(work, weight_bytes=work.weight_bytes * tiles, decoded=work.decoded * tiles)
            forward, backward, again = _segment_seconds(work, tokens, costs.shape, device, rows)
            seconds.append((forward, backward + (again if segment.runs_again else 0.0), again))
        return seconds

    seconds_of = {tiles: segment_seconds(tiles) for tiles in {1, most_tiles}}
    # The compiled step knows no documents: where its copies are depends on whole rows.
    of_rows = {tiles: segment_seconds(tiles, rows=True) for tiles in {1, most_tiles}}

    # A plan is one set of residuals for each placement, stored as bits. There are far fewer sets than plans.
    bits = 2 ** np.arange(count := len(costs.layers.all_residuals))
    kept_masks, offloaded, dropped, rounded = ((placed == index) @ bits for index, _ in enumerate(PLACEMENTS))

    def names(mask: int) -> tuple[str, ...]:
        """Names of a set of residuals; bit i of `mask` stands for Layers.all_residuals[i]."""
        return tuple(residual.name for index, residual in enumerate(costs.layers.all_residuals) if mask >> index & 1)

    def of_sets(masks: np.ndarray, function: Callable[[int], Any]) -> np.ndarray:
        """function(mask) for each mask, computed once for equal masks: [plans, ...]."""
        values, where = np.unique(masks, return_inverse=True)
        return np.array([function(int(mask)) for mask in values])[where]

    def size(mask: int, most: float = math.inf) -> float:
        """Bytes of a set in a micro-batch, without residuals larger than `most`."""
        return sum(mean_sizes[name] for name in names(mask) if mean_sizes[name] <= most)

    def remade(mask: int) -> tuple[float, ...]:
        """Bits from `count` up are residuals kept in FP8."""
        dropped, rounded = names(mask), names(mask >> count)
        tiles = most_tiles if set(dropped).issuperset(costs.layers.tiled) else 1
        return *_remade(costs, dropped, rounded, mean_sizes, of_kinds, seconds_of[tiles], tokens, device, tiles), tiles

    def travelling(mask: int) -> tuple[float, float]:
        """Bit `count` says that MLPs run over tiles."""
        seconds = of_rows[most_tiles if mask >> count else 1]
        return _travelling(costs, names(mask), mean_sizes, size(mask & (1 << count) - 1), seconds, device)

    again, at_feed_forward, at_mixer, work_forward, tiles = of_sets(dropped | rounded << count, remade).T
    leaving, arriving = of_sets(offloaded | (tiles > 1).astype(int) << count, travelling).T
    hosted, in_fp8 = of_sets(offloaded, size), of_sets(rounded, size)
    low_rank = of_sets(dropped, lambda mask: _low_rank_bytes(costs, names(mask), tokens))
    gaps = of_sets(offloaded, lambda mask: size(mask, tokens * costs.shape.hidden_size * costs.shape.dtype.itemsize))
    rounding = in_fp8 * (1 + 1 / costs.shape.dtype.itemsize)
    rounding = rounding / (device.copy * product_time(device).decoded_share)  # the same for reading it
    fit, gap_share = step_time(device), ALLOCATOR_BYTES.of("xla", device.name).arriving
    once = {number: [sum(column) for column in zip(*seconds, strict=True)] for number, seconds in seconds_of.items()}
    longer = sum(rows[1] - documents[1] for rows, documents in zip(of_rows[1], seconds_of[1], strict=True))
    forward, backward = (np.where(tiles > 1, once[most_tiles][i], once[1][i]) for i in (0, 1))
    forward = forward + rounding + fit.layer_seconds
    backward = backward + again + rounding + 2 * fit.layer_seconds
    leave, arrive = (size / (device.link or device.copy) for size in (hosted, costs.moved.link_bytes))
    # Residuals are copied under parts of a layer, weights that stream under all of it. In the forward they pass each
    # other on the link, which carries as much each way at once; in the backward both come.
    waits = [
        np.maximum(np.maximum(leave - fit.hidden * seconds, coming - seconds), 0.0)
        for seconds, coming in ((forward, arrive), (backward, leave + arrive))
    ]
    lost = fit.lost * (leave + arrive)
    return LayerForecast(
        kept=of_sets(kept_masks, size)
        + in_fp8 / costs.shape.dtype.itemsize
        + low_rank,  # one scale per token is negligible
        hosted=hosted,
        leaving=leaving,
        arriving=arriving,
        work_forward=work_forward,
        work=np.maximum(
            np.maximum(at_feed_forward + (hosted + arriving) + gap_share * gaps, at_mixer + 2 * hosted), 0.0
        )
        + costs.layers.dropout_bytes * tokens,
        forward=forward + waits[0] + lost,
        backward=backward + waits[1] + lost,
        recompute=again,
        wait=waits[0] + waits[1],
        row_backward=backward + waits[1] + lost + longer,
    )


def _low_rank_bytes(costs: StepParts, dropped, tokens: float) -> float:
    return tokens * sum(
        segment.low_rank for segment in costs.layers.segments if set(dropped).isdisjoint(segment.low_rank_with)
    )


def _remade(
    costs: StepParts, dropped, rounded, mean_sizes, of_kinds, seconds, tokens, device, tiles
) -> tuple[float, ...]:
    """What recomputation takes: (seconds of the mean layer, bytes in a feed-forward's backward, in a mixer's, at the
    forward's end); -inf: no such backward.

      dropped, rounded: residuals that are recomputed, and kept in FP8.
      mean_sizes, of_kinds: {residual: bytes in a micro-batch} of the mean layer, and of each kind.
    """

    def in_tiles(sizes):
        return sizes | {name: sizes[name] / tiles for name in costs.layers.tiled if name in sizes}

    size, recompute = in_tiles(mean_sizes), 0.0
    for segment, (_, _, once) in zip(costs.layers.segments, seconds, strict=True):
        missing = sum(size[name] for name in segment.outputs if name in dropped)
        if missing and not segment.ends and not segment.runs_again:
            share = missing / sum(size[name] for name in segment.outputs) if segment.separable else 1.0
            recompute += share * once
            if segment.decodes_once:
                recompute -= _decode_seconds(segment.work, tokens, device, costs.shape.devices)
    at_feed_forward, at_mixer, work_forward = -math.inf, -math.inf, 0.0
    for kind, sizes in zip(costs.layers.kinds, of_kinds, strict=True):
        facts = Sizes(
            residuals=in_tiles(sizes),
            recomputed=frozenset((*dropped, *rounded)),  # a residual kept in FP8 is decoded anew in the backward
            tiles=tiles,
            dtype=costs.shape.dtype,
            length=costs.shape.length,
            hopper=device.hopper,
            device=device.name,
        )
        moments = _backward_bytes(kind, facts)
        at_feed_forward, at_mixer = max(at_feed_forward, moments[0]), max(at_mixer, moments[1])
        work_forward = max(work_forward, kind.block.forward_bytes(facts, kind.renamed))
    return recompute, at_feed_forward, at_mixer, work_forward


def _travelling(costs: StepParts, offloaded, mean_sizes, hosted: float, seconds, device) -> tuple[float, float]:
    """(forward, backward) bytes still on the host link while the next layer's feed-forward runs."""
    travelling = [hosted, hosted]
    offloaded = sorted(offloaded, key=lambda name: mean_sizes[name], reverse=True)
    for direction in (0, 1):
        stages = [
            times[direction]
            for segment, times in zip(costs.layers.segments, seconds, strict=True)
            if segment.in_mixer and not (direction and segment.first)
        ]
        room = step_time(device).hidden * sum(stages) * (device.link or device.copy)
        for name in offloaded:
            if mean_sizes[name] > room:
                break
            room -= mean_sizes[name]
            travelling[direction] -= mean_sizes[name]
    return travelling[0], travelling[1]


def _backward_bytes(kind: LayerKind, sizes: Sizes) -> tuple[float, float]:
    """The most device bytes of (a feed-forward's, a mixer's) backward; -inf: none."""
    block = kind.block
    dropped = {name: sizes[name] for name in kind.residuals if name in sizes.recomputed}
    derivatives = kind.derivative_bytes
    waiting = sum(bytes_of(sizes) for outputs, bytes_of in derivatives if not dropped.keys().isdisjoint(outputs))
    remaining = sum(dropped.values())  # without the residuals of parts whose backward is done
    at_feed_forward, at_mixer, covered = -math.inf, -math.inf, False
    for layer_part, outputs in reversed([*kind.outputs.items()]):
        scratch = block.backward_bytes(layer_part, sizes, kind.renamed)
        bytes_here = remaining + scratch.own_bytes + scratch.other_segments_bytes
        if layer_part in kind.mixer_outputs:
            if sizes.tiles > 1:
                bytes_here -= sum(dropped.get(name, 0.0) for name in outputs[-1])
            at_mixer = at_mixer if covered else max(at_mixer, bytes_here)
        elif scratch.covers_mixer:
            mixers = _mixers_before(kind, layer_part)
            later = sum(_made_later(kind.outputs[mixer], dropped) for mixer in mixers) if scratch.mixer_later else 0.0
            covered = not later
            of_mixers = sum(block.waiting_bytes(mixer, sizes, kind.renamed) for mixer in mixers)
            at_mixer = max(at_mixer, bytes_here + waiting + of_mixers - later)
        else:
            later = sum(_not_made_yet(kind.outputs[mixer], dropped) for mixer in _mixers_before(kind, layer_part))
            at_feed_forward = max(at_feed_forward, bytes_here + waiting - later)
        for name in (name for segment_outputs in outputs for name in segment_outputs):
            remaining -= dropped.get(name, 0.0)
    return at_feed_forward, at_mixer


def _mixers_before(kind: LayerKind, feed_forward: str) -> list[str]:
    before = itertools.takewhile(lambda name: name != feed_forward, kind.outputs)
    return [name for name in before if name in kind.mixer_outputs]


def _not_made_yet(outputs: tuple[tuple[str, ...], ...], dropped: Mapping[str, float]) -> float:
    """Bytes of the mixer's first dropped residuals, not in memory while the feed-forward is differentiated."""
    if any(name in dropped for segment_outputs in outputs[1:-1] for name in segment_outputs):
        return 0.0
    return sum(dropped.get(name, 0.0) for name in outputs[0])


def _made_later(outputs: tuple[tuple[str, ...], ...], dropped: Mapping[str, float]) -> float:
    """Bytes of a mixer that is recomputed from its input, if the feed-forward needs none of it."""
    *own, last = outputs
    if any(name in dropped for name in last) or any(name not in dropped for names in own for name in names):
        return 0.0
    return sum(dropped[name] for names in own for name in names)
