"""What /metrics tells, in a registry of the server's own: the engine's numbers as they are when asked, and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

from kvcompile.serve.request import Delta
from kvcompile.serve.stats import Stats

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

_NOW = {
    "waiting": ("kvcompile_requests_waiting", "Sequences in the queue."),
    "running": ("kvcompile_requests_running", "Sequences in the batch."),
    "swapped": ("kvcompile_requests_swapped", "Sequences that lost their place to swapping."),
    "pages": ("kvcompile_pages", "Pages of all pools."),
    "pages_held": ("kvcompile_pages_held", "Pages that sequences hold."),
    "pages_cached": ("kvcompile_pages_cached", "Pages that nobody holds and that a prefix may find."),
    "bytes": ("kvcompile_cache_bytes", "Memory of pools and rows."),
    "host_pages": ("kvcompile_host_pages", "Evicted pages in the host's memory."),
    "snapshots": ("kvcompile_snapshots", "Snapshots, and pieces of them, in the host's memory."),
    "host_bytes": ("kvcompile_host_bytes", "Memory of evicted pages and snapshots on the host."),
    "store_bytes": ("kvcompile_store_bytes", "Files of the store."),
    "tokens_per_second": ("kvcompile_tokens_per_second", "Completion tokens, over the last seconds."),
}
_COUNTED = {
    "requests": ("kvcompile_requests_submitted", "Requests that the engine took."),
    "finished": ("kvcompile_requests_finished", "Requests that ended by themselves."),
    "failed": ("kvcompile_requests_failed", "Requests that a step failed."),
    "cancelled": ("kvcompile_requests_cancelled", "Requests that were cancelled."),
    "prompt_tokens": ("kvcompile_prompt_tokens", "Tokens of prompts."),
    "completion_tokens": ("kvcompile_completion_tokens", "Tokens of texts."),
    "cached_tokens": ("kvcompile_prefix_cache_hit_tokens", "Tokens of prompts out of the prefix cache."),
    "found_device_tokens": ("kvcompile_prefix_found_device_tokens", "Tokens found on the device."),
    "found_host_tokens": (
        "kvcompile_prefix_found_host_tokens",
        "Tokens found in the host's memory at the slowest.",
    ),
    "found_store_tokens": (
        "kvcompile_prefix_found_store_tokens",
        "Tokens found in the store at the slowest.",
    ),
    "preemptions": ("kvcompile_preemptions", "How often a sequence lost its place."),
    "recomputed_tokens": (
        "kvcompile_recomputed_tokens",
        "Tokens that preemptions made to be computed again.",
    ),
    "swapped_bytes": ("kvcompile_swapped_bytes", "Bytes that preemptions moved."),
    "steps": ("kvcompile_steps", "Steps of the engine."),
}


class _Engine(Collector):
    """The engine's numbers, read when they are asked for."""

    def __init__(self, stats: Callable[[], Stats]):
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering asks no engine."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for field, (name, text) in _NOW.items():
            yield GaugeMetricFamily(name, text, getattr(stats, field))
        used = stats.pages_held / stats.pages if stats.pages else 0.0
        yield GaugeMetricFamily("kvcompile_cache_usage_ratio", "Pages that are held, of all.", used)
        for field, (name, text) in _COUNTED.items():
            yield CounterMetricFamily(name, text, getattr(stats, field))


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self, stats: Callable[[], Stats]):
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(stats))
        self.requests = Counter(
            "kvcompile_http_requests",
            "Requests by route and by how they ended.",
            ("route", "outcome"),
            registry=self._registry,
        )
        self._first = self._histogram("time_to_first_token", "From the request to its first token.", _SECONDS)
        self._between = self._histogram("inter_token", "From a token of a text to its next one.", _SHORT)
        self.total = self._histogram("request", "From a request that was taken to its end.", _SECONDS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvcompile_{name}_seconds", text, buckets=buckets, registry=self._registry)

    def clock(self, began: float) -> Clock:
        """For the tokens of one request that came at `began` (time.monotonic())."""
        return Clock(self._first, self._between, began)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)


class Clock:
    """Notes when tokens of a request come; a step that brings several counts as so many equal times."""

    def __init__(self, first: Histogram, between: Histogram, began: float):
        self._first, self._between, self._began = first, between, began
        self._last: dict[tuple[int, int], float] = {}

    def note(self, prompt: int, delta: Delta) -> None:
        """A delta of one prompt's text has come."""
        if not delta.tokens:
            return
        now, key, count = time.monotonic(), (prompt, delta.index), len(delta.tokens)
        if not self._last:
            self._first.observe(now - self._began)
        if key in self._last:
            for _ in range(count):
                self._between.observe((now - self._last[key]) / count)
        self._last[key] = now
