"""Numbers for Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jaxtune.serve.engine import Engine
from jaxtune.serve.requests import Usage

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Of one server."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        self._registry.register(_Rows(engine))

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"jaxtune_{name}", words, labels, registry=self._registry)

        self._requests = counter("requests", "Requests that were answered or refused, by status.", "path", "status")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "model")
        self._cached_tokens = counter(
            "cached_prompt_tokens",
            "Of them, those whose states an earlier prompt had left.",
            "model",
        )
        self._answer_tokens = counter("answer_tokens", "Tokens of answers.", "model")
        self._first, self._whole = (
            Histogram(f"jaxtune_{name}_seconds", words, ["model"], registry=self._registry, buckets=_SECONDS)
            for name, words in (
                ("first_token", "From the arrival of a body to the first tokens of its answers."),
                ("answer", "From the arrival of a body to the end of its answers."),
            )
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, str(status)).inc()

    def forget(self, model: str) -> None:
        """Removes a model's labels; answers under way count on, unseen."""
        for numbers in (self._prompt_tokens, self._cached_tokens, self._answer_tokens, self._first, self._whole):
            with contextlib.suppress(KeyError):  # it answered nothing
                numbers.remove(model)

    def answer(self, model: str, prompt_tokens: int, began: float) -> Progress:
        """Counts an answer that begins. began: of the monotonic clock, when its body had arrived."""
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        tokens, cached = self._answer_tokens.labels(model), self._cached_tokens.labels(model)
        return Progress(tokens, cached, self._first.labels(model), self._whole.labels(model), began)


class Progress:
    """One request's answers."""

    def __init__(self, tokens: Counter, cached: Counter, first: Histogram, whole: Histogram, began: float):
        self._tokens, self._cached, self._first, self._whole = tokens, cached, first, whole
        self._began, self._has_tokens = began, False

    def add(self, tokens: int) -> None:
        self._tokens.inc(tokens)
        if tokens and not self._has_tokens:
            self._has_tokens = True
            self._first.observe(time.monotonic() - self._began)

    def end(self, usage: Usage) -> None:
        self._cached.inc(usage.reused)
        self._whole.observe(time.monotonic() - self._began)


class _Rows(Collector):
    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        decoding = GaugeMetricFamily("jaxtune_rows_decoding", "Rows that decode.", labels=["model"])
        waiting = GaugeMetricFamily("jaxtune_rows_waiting", "Rows that wait for a slot.", labels=["model"])
        for model, (now, later) in self._engine.counts().items():
            decoding.add_metric([model], now)
            waiting.add_metric([model], later)
        yield decoding
        yield waiting
