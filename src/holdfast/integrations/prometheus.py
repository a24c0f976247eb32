"""Count the events of a manager for Prometheus. Needs `prometheus-client`, the extra `holdfast[metrics]`."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from holdfast import Event, UsageError

try:
    import prometheus_client
except ImportError as missing:
    raise ImportError(
        "holdfast.integrations.prometheus needs prometheus-client: pip install holdfast[metrics]"
    ) from missing

__all__ = ["PrometheusObserver"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


@dataclass(frozen=True)
class _Metrics:
    """The metrics of one registry. Several observers of a process share them."""

    labels: tuple[str, ...]
    events: Any
    seconds: Any
    phases: Any
    bytes_: Any
    last_step: Any
    last_bytes: Any
    last_time: Any

    @classmethod
    def registered(cls, registry: Any, names: tuple[str, ...]) -> _Metrics:
        def make(kind: Any, name: str, text: str, *more: str, **options: Any) -> Any:
            return kind(f"holdfast_{name}", text, (*names, *more), registry=registry, **options)

        counter, gauge, histogram = prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram
        return cls(
            labels=names,
            events=make(counter, "events", "Events of checkpoints, by kind.", "kind"),
            seconds=make(histogram, "seconds", "Duration of saves and restores.", "work", buckets=_SECONDS),
            phases=make(histogram, "phase_seconds", "Duration of their parts.", "work", "phase", buckets=_SECONDS),
            bytes_=make(counter, "bytes", "Bytes of checkpoints that were committed or restored.", "work"),
            last_step=make(gauge, "last_committed_step", "Step of the last committed checkpoint."),
            last_bytes=make(gauge, "last_committed_bytes", "Size of the last committed checkpoint."),
            last_time=make(gauge, "last_committed_timestamp_seconds", "When the last checkpoint was committed."),
        )


_KNOWN: WeakKeyDictionary[Any, _Metrics] = WeakKeyDictionary()
_LOCK = threading.Lock()


class PrometheusObserver:
    """Counts what happens to checkpoints, as metrics of Prometheus. One of `observers=` of a `CheckpointManager`.

    registry: where the metrics are registered; the default one of `prometheus_client` without it, which
        `prometheus_client.start_http_server(port)` serves.
    labels: labels of every metric, such as `{"run": "gpt-7b"}`. All observers of one registry have the same names. The
        label `rank` is always there.
    """

    def __init__(self, *, registry: Any = None, labels: Mapping[str, str] | None = None) -> None:
        chosen = registry if registry is not None else prometheus_client.REGISTRY
        given = dict(labels or {})
        if "rank" in given or not all(isinstance(name, str) for name in given):
            raise UsageError(f"labels={labels!r:.100}", advice="give texts by name; 'rank' is always a label")
        names = (*sorted(given), "rank")
        with _LOCK:
            metrics = _KNOWN.get(chosen)
            if metrics is None:
                metrics = _KNOWN[chosen] = _Metrics.registered(chosen, names)
        if metrics.labels != names:
            raise UsageError(
                f"the metrics of this registry have the labels {', '.join(metrics.labels)}, not {', '.join(names)}",
                advice="use the same labels for all observers of a registry, or a registry for each",
            )
        self._metrics = metrics
        self._given = given

    def __call__(self, event: Event) -> None:
        labels = {**self._given, "rank": str(event.rank)}
        metrics = self._metrics
        metrics.events.labels(**labels, kind=event.kind).inc()
        work = {"committed": "save", "restored": "restore"}.get(event.kind)
        if work is None:
            return
        metrics.seconds.labels(**labels, work=work).observe(event.seconds)
        metrics.bytes_.labels(**labels, work=work).inc(event.size_bytes)
        for phase, seconds in event.phases.items():
            metrics.phases.labels(**labels, work=work, phase=phase).observe(seconds)
        if event.kind == "committed":
            metrics.last_step.labels(**labels).set(event.step or 0)
            metrics.last_bytes.labels(**labels).set(event.size_bytes)
            metrics.last_time.labels(**labels).set(time.time())
