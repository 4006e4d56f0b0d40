"""What a sampler is made of: its slots, their programs, and what fills and runs them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxtune.models.generation import slots as device
from jaxtune.models.generation.admission import Admission
from jaxtune.models.generation.caches import Caches
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.ready import Ready, Shapes
from jaxtune.models.generation.rounds import Rounds
from jaxtune.models.generation.row_programs import RowPrograms
from jaxtune.models.generation.sampled_model import SampledModel
from jaxtune.models.generation.slot_plan import SlotPlan, length_bucket
from jaxtune.models.generation.slot_rows import SlotRows
from jaxtune.models.vision.tower import TowerConfig


class Assembly(NamedTuple):
    rows: SlotRows
    caches: Caches
    ready: Ready
    prefills: Prefills
    row_programs: RowPrograms
    rounds: Rounds
    admission: Admission


def assembled(
    model: SampledModel,
    plan: SlotPlan,
    division: Division | None,
    tower: TowerConfig | None,
    *,
    steps: int,
    prefill_tokens: int,
    at_once: int,
    first_at_once: bool,
    compiles_beside: bool,
    prefills_alone: bool,
    deterministic: bool,
    exact: bool,
    prefix_bytes: int | None,
) -> Assembly:
    """Of a plan's slots on each device.

    steps: of a round. at_once: tokens that are prefilled while most slots are free. prefix_bytes: as of Prefills.
    Others: as of Sampler.
    """
    if division is None:
        devices, programs = 1, device.programs_of(deterministic, plan.slots, exact)
    else:
        devices, programs = division.devices, division.programs(deterministic, plan.slots, exact)
    count, weights = plan.slots * devices, model.weights
    vocab_size = weights.structure.config.vocab_size
    rows = SlotRows(programs, count, vocab_size, tower is not None, compiles_beside, division)
    rows.lets_wait = not (deterministic or exact)  # or what others sample decides which tokens are made anew
    caches = Caches(programs, model, count, division)
    array = weights.leaves[0] if weights.are_arrays else jax.device_put(np.zeros(()))
    where = jax.sharding.SingleDeviceSharding(min(array.devices(), key=lambda device: device.id))
    of_model = programs, weights.structure, weights.shapes
    ready = Ready(Shapes(*of_model, weights.gated, where, rows.host, tower), compiles_beside)
    prefills = Prefills(
        *of_model,
        prefill_tokens,
        at_once,
        one_at_a_time=deterministic or prefills_alone,
        ready=ready,
        gated=weights.gated,
        prefix_bytes=prefix_bytes,
        division=division,
    )
    longest = weights.structure, weights.shapes, count, length_bucket(plan.length)
    whole = deterministic or (compiles_beside and device.reads_lengths(*longest))
    row_programs = RowPrograms(ready, prefills, rows, caches, plan.length, steps, first_at_once, whole)
    of_slots = programs, model, rows, caches
    rounds = Rounds(*of_slots, row_programs, steps, first_at_once)
    admission = Admission(*of_slots, prefills, row_programs, ready, prefill_tokens)
    return Assembly(rows, caches, ready, prefills, row_programs, rounds, admission)
