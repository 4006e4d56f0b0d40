"""Races between the threads of a kernel, which Pallas' GPU interpreter looks for where a test asks for it.

The interpreter keeps a clock for each thread and tells which accesses of shared memory no barrier puts in order. Of a
copy by TMA into shared memory it also demands a fence (commit_smem) after what other threads *read* there. Hardware
needs none: what a thread has read is in its registers when it arrives at the barrier that the copy waits for, and
CUTLASS' pipelines release their slots the same way. So a copy is compared here with earlier reads by barriers alone,
and with earlier writes by barriers and fences.

The interpreter notes copies out of shared memory in the order in which they end, but hardware waits for them in the
order in which they began, and copies may overtake each other. So waiting for all but n of them is taken here as waiting
for all.

Only shared memory is searched. In global memory tiles that overlap store the same numbers on purpose, where their size
does not divide an array's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxtune.pallas import gpu_kernel

_SHARED = gpu_callbacks.memory.get_memory_space_idx(plgpu.SMEM)


class _Recorded(gpu_callbacks.GPURaceDetectionState):
    """Notes every race of every kernel: the interpreter forgets a kernel's when the next one begins."""

    found: list[object]

    def check_read(self, thread, clock, buffer_key, *place, **options) -> None:
        if buffer_key.memory_space_id == _SHARED:
            super().check_read(thread, clock, buffer_key, *place, **options)

    def check_write(self, thread, clock, buffer_key, *place, **options) -> None:
        if buffer_key.memory_space_id == _SHARED:
            super().check_write(thread, clock, buffer_key, *place, **options)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "races_found" and value:
            self.found.append(value)
        super().__setattr__(name, value)


def _copied(task, tma_thread_id: int, shared_memory) -> None:
    """AsyncCopyGmemToSmemTask.post_read, by the rule above."""
    if not shared_memory.detect_races:
        return
    task.clock.inc(tma_thread_id)
    races, key, place = gpu_callbacks.get_races(), task.dst_allocation_key, task.dst_access.range
    by_barriers, by_fences = task.clock.generic_clock.copy(), task.clock.async_smem_clock.copy()
    frame = source_info_util.summarize(task.source_info)
    with races.lock:
        before = [(other, by_barriers) for other in races.reads[key]]
        before += [(other, by_fences) for other in races.writes[key]]
        races.writes[key].append((task.thread, by_fences, place, frame))
    for (thread, clock, where, their_frame), own in before:
        if not clock.ordered(own) and race_detection_state._ranges_overlap(place, where):
            print(f"RACE DETECTED\n  copy to {key}[{place}] by {task.thread}, {frame}\n  {thread}, {their_frame}")
            races.races_found = True


@contextlib.contextmanager
def detected() -> Iterator[list[object]]:
    """Kernels that are interpreted here are searched for races; the list has one entry for each, and the interpreter
    prints where."""
    found: list[object] = []
    recorded = type("Recorded", (_Recorded,), {"found": found})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", recorded)
        patch.setattr(gpu_callbacks.AsyncCopyGmemToSmemTask, "post_read", _copied)
        interpreted = gpu_callbacks.memory.GPUSharedMemory
        wait = interpreted.wait_smem_to_gmem
        patch.setattr(interpreted, "wait_smem_to_gmem", lambda memory, thread, n, read: wait(memory, thread, 0, read))
        params = functools.partial(plgpu.InterpretGPUParams, detect_races=True)
        patch.setattr(gpu_kernel.plgpu, "InterpretGPUParams", params)
        yield found
