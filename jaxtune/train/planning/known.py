"""Plans that were too large, stored with the compiled programs, so that the same command starts with the plan that
fitted last time.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import jax

from jaxtune.system import processes, sources
from jaxtune.system.program_cache import ProgramCache, in_use
from jaxtune.train.planning.forecasts import Forecast
from jaxtune.train.planning.search import Failed


class KnownFailures:
    """Failed plans of the same programs, device kind, platform version, JAX and sources of jaxtune. Without a cache of
    programs, or on a CPU, it knows this object's alone. Construction is collective: all processes use what the first
    reads; only the first writes.

      facts: JSON values that identify the programs.
    """

    def __init__(self, facts: Any):
        self._cache = _cache()
        device = jax.local_devices()[0]
        made_with = (device.device_kind, device.client.platform_version, jax.__version__, sources.digest())
        text = json.dumps([facts, made_with], sort_keys=True, default=str)
        self._key = f"plans-{hashlib.sha256(text.encode()).hexdigest()}"
        self._found: list[dict[str, Any]] = processes.of_first(self._read)

    def _read(self) -> list[dict[str, Any]]:
        if self._cache is None or not sources.are_unchanged():
            return []
        content = self._cache.get(self._key)
        return [] if content is None else json.loads(content)

    def of(self, forecast: Forecast, budget_bytes: float | None) -> Failed | None:
        """The failure of exactly this plan, if it shows that `budget_bytes` is too little (None: no limit; any failure
        counts). If memory ran out, the need is unknown, and budgets up to the one at that time are too little.
        """
        plan = forecast.plan.to_record()
        for entry in self._found:
            # A plan that ran out of memory may still fit a larger budget.
            too_large = entry["need"] is not None or entry["budget"] is None or entry["budget"] >= (budget_bytes or 0.0)
            if entry["plan"] == plan and too_large:
                failure = Failed(forecast.plan, forecast.peak_bytes, entry["need"], entry["short"])
                if failure.need_bytes is None or failure.need_bytes > (budget_bytes or 0.0):
                    return failure
        return None

    def add(self, failed: Failed, budget_bytes: float | None) -> None:
        """Records a failure. budget_bytes: what the plan might take; None: no limit."""
        facts = {"need": failed.need_bytes, "short": failed.short_bytes, "budget": budget_bytes}
        self._found.append({"plan": failed.plan.to_record(), **facts})
        if self._cache is not None and processes.first() and sources.are_unchanged():
            self._cache.put(self._key, json.dumps(self._found).encode())


def _cache() -> ProgramCache | None:
    return None if jax.local_devices()[0].platform == "cpu" else in_use()
