"""The metrics of other engines, by their names, for their dashboards (`telemetry.metric_names`).

Each is made of measurements that the pipeline records in any case, beside its own metrics.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec
from prometheus_client import Counter, Gauge, Histogram

from ...bus.public import Completion
from .. import names
from ..instruments import Instrument

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Labels = Mapping[str, str]

How = Literal["each", "sum", "ratio", "share", "rate"]
"""A gauge's value, by the last measurements of its sources: "each": of the one; "sum": of all;
"ratio": of the first by the second; "share": of the first in the sum; "rate": of the one, a count,
by the seconds since the measurement before."""

Of = Literal["", "finish_reasons", "longest", "samples", "running", "requests", "aborted"]
"""A number of a request that has ended, in place of a measurement."""


class Alias(msgspec.Struct, frozen=True):
    """A metric of another engine.

    Attributes:
        name: As it is exposed, without the suffix of its kind.
        kind: As of an `Instrument`.
        description: Shown by Prometheus as HELP.
        sources: The instruments that it is made of.
        buckets: Upper bounds of a histogram's buckets.
        where: A label and its value; other measurements don't count.
        label: One more label: its name, and the source's label that has its value.
        how: Of a gauge.
        of: Of a metric without sources.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    sources: tuple[Instrument, ...] = ()
    buckets: tuple[float, ...] = ()
    where: tuple[str, str] | None = None
    label: tuple[str, str] | None = None
    how: How = "each"
    of: Of = ""


class Engine(msgspec.Struct, frozen=True):
    """The metrics of an engine.

    Attributes:
        replica: The label of a replica.
        constants: Labels that have one value here.
        aliases: The metrics.
    """

    replica: str
    constants: dict[str, str]
    aliases: tuple[Alias, ...]


class Aliases:
    """Records the metrics of another engine. Called from any thread."""

    def __init__(self, engine: Engine, registry: CollectorRegistry, model: str) -> None:
        """`model`: the label of measurements that name none."""
        self._engine, self._model = engine, model
        self._ended: list[tuple[Of, _Recorded]] = []
        self._of_source: dict[str, list[_Recorded]] = defaultdict(list)
        for alias in engine.aliases:
            recorded = _Recorded(alias, engine, registry)
            if alias.of:
                self._ended.append((alias.of, recorded))
            for source in alias.sources:
                self._of_source[source.name].append(recorded)

    def recorder(self, name: str) -> Callable[[float, Labels], None] | None:
        """Return the function that takes an instrument's measurements; None for no metric of it."""
        recorded = self._of_source.get(name)
        if recorded is None:
            return None

        def record(value: float, labels: Labels) -> None:
            own = self._own(labels)
            for each in recorded:
                each.take(name, value, labels, own)

        return record

    def ended(self, completion: Completion, labels: Labels) -> None:
        """Record a request that has ended. `labels`: those of each of its measurements."""
        own = self._own({names.REQUEST_MODEL: completion.model, **labels})
        for of, recorded in self._ended:
            for value, reason in _numbers(of, completion):
                recorded.put(value, (*own, *reason))

    def _own(self, labels: Labels) -> tuple[str, ...]:
        model = labels.get(names.REQUEST_MODEL) or self._model
        return (model, labels.get(names.REPLICA, "0"), *self._engine.constants.values())


class _Recorded:
    """One metric, and what it knows of its sources."""

    def __init__(self, alias: Alias, engine: Engine, registry: CollectorRegistry) -> None:
        self._alias = alias
        own = ("model_name", engine.replica, *engine.constants)
        label = alias.label or (("finished_reason", "") if alias.of == "finish_reasons" else None)
        about = (alias.name, alias.description, own + ((label[0],) if label else ()))
        self._metric: Counter | Gauge | Histogram
        match alias.kind:
            case "counter":
                self._metric = Counter(*about, registry=registry)
            case "gauge":
                self._metric = Gauge(*about, registry=registry)
            case _:
                self._metric = Histogram(*about, registry=registry, buckets=alias.buckets)
        self._order = [source.name for source in alias.sources]
        # By labels: the last value of each source.
        self._last: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
        self._at: dict[tuple[str, ...], float] = {}

    def take(self, source: str, value: float, labels: Labels, own: tuple[str, ...]) -> None:
        """Take a measurement of a source."""
        alias = self._alias
        if alias.where is not None and labels.get(alias.where[0]) != alias.where[1]:
            return
        if alias.label is not None:
            own = (*own, labels.get(alias.label[1], ""))
        if alias.how == "each":
            self.put(value, own)
            return
        last = self._last[own]
        last[source] = value
        if (combined := self._combined(own, [last.get(name) for name in self._order])) is not None:
            self.put(combined, own)

    def _combined(self, own: tuple[str, ...], values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        if self._alias.how == "sum":
            return sum(known)
        if self._alias.how == "rate":
            now = time.monotonic()
            before, self._at[own] = self._at.get(own, now), now
            return known[0] / (now - before) if now > before else None
        if len(known) < len(values):
            return None
        whole = sum(known) if self._alias.how == "share" else known[1]
        # Without any the last one holds.
        return known[0] / whole if whole else None

    def put(self, value: float, own: tuple[str, ...]) -> None:
        """Add to a counter, set a gauge, or put a value into a histogram."""
        metric = self._metric.labels(*own)
        if isinstance(metric, Counter):
            metric.inc(value)
        elif isinstance(metric, Gauge):
            metric.set(value)
        else:
            metric.observe(value)


def _numbers(of: Of, completion: Completion) -> list[tuple[float, tuple[str, ...]]]:
    """Return a request's numbers, with the values of further labels."""
    samples = completion.samples
    match of:
        case "finish_reasons":
            return [(1, (sample.finish_reason,)) for sample in samples]
        case "longest" if samples:
            return [(max(len(sample.token_ids) for sample in samples), ())]
        case "samples" if samples:
            return [(len(samples), ())]
        case "running":
            executor = completion.timings.of("executor")
            return [((executor.end_ns - executor.start_ns) / 1e9, ())] if executor else []
        case "requests":
            return [(1, ())]
        case "aborted" if completion.status in ("cancelled", "expired"):
            return [(1, ())]
    return []


def open_aliases(
    engine: Literal["vllm", "sglang"], registry: CollectorRegistry, model: str
) -> Aliases:
    """Return the metrics of an engine, which the registry shows; `model` as of `Aliases`."""
    if engine == "vllm":
        from .vllm import VLLM as found
    else:
        from .sglang import SGLANG as found
    return Aliases(found, registry, model)
