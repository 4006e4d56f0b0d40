"""A cache of plans that were too large (`KnownFailures`), so that the same command starts with the plan that fitted the
last time.

Entries are stored in the cache of compiled programs (`_cache`): damaged files and files of other users are ignored
there, and the oldest are deleted if space is short. Their key covers all sources of jaxtune (`_sources`).
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jax

from jaxtune.system import processes
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.search import Failed
from jaxtune.train.program.program_cache import ProgramCache, in_use


class KnownFailures:
    """A record, in the cache of compiled programs, of the plans that needed more device memory than there was, so that
    a later run of the same programs does not try them again (`Planner.skip_known_failures`). `of` looks a plan up, and
    `add` records one. Without such a cache, or on a CPU, failures are known to this object only.

    A record applies only to the same kind of device with the same platform version (such as that of CUDA), the same
    version of JAX and the same sources of jaxtune. In a run of several processes, all of them use what the first one
    reads, so all must make the object (a collective call), and only the first one writes. Engine makes it.

    Args:
      facts: JSON values that identify the programs with which the plans were tried.
    """

    def __init__(self, facts: Any):
        """Reads the failures that are recorded for these facts, this device and this version. A collective call: all
        processes get what the first one reads."""
        self._cache = _cache()
        device = jax.local_devices()[0]
        made_with = (device.device_kind, device.client.platform_version, jax.__version__, _sources())
        text = json.dumps([facts, made_with], sort_keys=True, default=str)
        self._key = f"plans-{hashlib.sha256(text.encode()).hexdigest()}"
        self._found: list[dict[str, Any]] = processes.of_first(self._read)

    def _read(self) -> list[dict[str, Any]]:
        """The stored failures, one dict each: "plan" (StepPlan.to_record), "need" (the bytes that it needs; None:
        unknown), "short" (Failed.short_bytes) and "budget" (the bytes that it might take; None: no limit); [] if
        nothing is cached. They are read once, by the first process, when the object is made."""
        content = None if self._cache is None else self._cache.get(self._key)
        return [] if content is None else json.loads(content)

    def of(self, forecast: Forecast, budget_bytes: float | None) -> Failed | None:
        """The recorded failure of exactly the plan of `forecast`, if it shows that the plan is too large for
        `budget_bytes` of device memory (None: no limit, and then every failure of this plan counts); otherwise
        None. A known need must exceed the budget; a plan whose need is unknown, because memory ran out, is too large
        for budgets up to the one that it had then, and for any budget if it had none ("budget" is None).
        `Planner.skip_known_failures` asks it."""
        plan = forecast.plan.to_record()
        for one in self._found:
            # A plan that ran out of memory may still fit a larger budget.
            too_large = one["need"] is not None or one["budget"] is None or one["budget"] >= (budget_bytes or 0.0)
            if one["plan"] == plan and too_large:
                failure = Failed(forecast.plan, forecast.peak_bytes, one["need"], one["short"])
                if failure.need_bytes is None or failure.need_bytes > (budget_bytes or 0.0):
                    return failure
        return None

    def add(self, failed: Failed, budget_bytes: float | None) -> None:
        """Records that the plan `failed` was too large, in this object and, by the first process, in the cache; a later
        run with the same facts reads it there. `Planner.replan` calls it.
        budget_bytes: the device memory that it might take; None: nothing limited it, and memory ran out."""
        facts = {"need": failed.need_bytes, "short": failed.short_bytes, "budget": budget_bytes}
        self._found.append({"plan": failed.plan.to_record(), **facts})
        if self._cache is not None and processes.first():
            self._cache.put(self._key, json.dumps(self._found).encode())


def _cache() -> ProgramCache | None:
    """The cache of compiled programs, in which KnownFailures reads and stores its record; None if programs are not
    cached, and on a CPU, whose plans are for tests and tiny runs."""
    return None if jax.local_devices()[0].platform == "cpu" else in_use()


@functools.cache
def _sources() -> str:
    """A hexadecimal SHA-256 of all Python files of jaxtune. It is part of the key under which plans that were too large
    are stored, because other code compiles to other programs. It is computed once in a process."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
