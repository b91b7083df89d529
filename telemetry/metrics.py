"""Metrics of one process, recorded through OpenTelemetry and read by Prometheus.

If nothing exposes them there is no meter, and a call costs one lookup in an empty dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import ConfigError, TelemetryConfig
from . import names
from .instruments import INSTRUMENTS, LOG_DROPPED, Instrument
from .log_output import dropped_lines
from .spans import resource_of, scope

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

    from ..bus.public import Completion
    from .aliases import Aliases

Labels = Mapping[str, str]

_NO_LABELS: Labels = {}

_PLAIN = "text/plain"
"""In OpenMetrics, which Prometheus prefers, the library writes the colon of `vllm:` as `_`."""

MOST_PRIORITY = 8
"""Priorities further from 0 share a label: clients choose them, and each label costs memory here
and in Prometheus."""


@dataclass(eq=False)
class Metrics:
    """Records measurements. Each process sets up its own.

    Attributes:
        provider: The destination; None for none.
        close: Ends its exposition.
        registry: Reads it.
        aliases: Records the metrics of another engine, too; None for none.
    """

    provider: MeterProvider | None = None
    close: Callable[[], None] = lambda: None
    registry: CollectorRegistry | None = None
    aliases: Aliases | None = None

    def __post_init__(self) -> None:
        self._always: Labels = _NO_LABELS
        self._record: dict[str, Callable[[float, Labels], None]] = {}
        if self.provider is not None:
            meter = self.provider.get_meter(scope().name, scope().version, scope().schema_url)
            self._record = {
                instrument.name: _recorder(meter, instrument)
                for instrument in INSTRUMENTS
                if instrument is not LOG_DROPPED
            }
            if self.aliases is not None:
                self._record = {
                    name: _both(record, self.aliases.recorder(name))
                    for name, record in self._record.items()
                }
            # Counted by the log output, for the whole process.
            meter.create_observable_counter(
                LOG_DROPPED.name, [_dropped_lines], LOG_DROPPED.unit, LOG_DROPPED.description
            )

    @property
    def enabled(self) -> bool:
        """Whether measurements are recorded."""
        return self.provider is not None

    def record(self, instrument: Instrument, value: float, labels: Labels = _NO_LABELS) -> None:
        """Add to a counter, set a gauge, or put a value into a histogram.

        Takes some microseconds: fit for a request or a step, not for each token.
        """
        record = self._record.get(instrument.name)
        if record is not None:
            record(value, {**self._always, **labels} if self._always else labels)

    def ended(self, completion: Completion) -> None:
        """Record a request that has ended in the metrics of another engine, if there are any."""
        if self.aliases is not None:
            self.aliases.ended(completion, self._always)

    def labelled(self, labels: Labels) -> Metrics:
        """Return the same metrics with these labels on every measurement."""
        if not labels or not self.enabled:
            return self
        other = copy.copy(self)
        other._always = {**self._always, **labels}
        return other

    def exposition(self, accept: str) -> tuple[bytes, str] | None:
        """Return all metrics as Prometheus reads them, which takes some milliseconds.

        Args:
            accept: The header of that name, by which Prometheus chooses a format.

        Returns:
            The text and its media type; None without a registry.
        """
        if self.registry is None:
            return None
        from prometheus_client.exposition import choose_encoder

        encode, media_type = choose_encoder(accept if self.aliases is None else _PLAIN)
        return encode(self.registry), media_type

    def listen(self, config: TelemetryConfig) -> None:
        """Listen on the port of the settings, if they have one.

        Raises:
            ConfigError: The port is taken, or the address is not this machine's.
        """
        if not config.metrics_port or self.registry is None:
            return
        from prometheus_client import start_http_server

        host, port = config.metrics_host, config.metrics_port
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"telemetry.metrics_port {port} on {host} can't be listened on: "
                f"{error.strerror or error}; take another port, or 0 for no metrics"
            ) from None

        if self.aliases is not None:
            expose = server.get_app()
            assert expose is not None
            server.set_app(lambda asked, start: expose({**asked, "HTTP_ACCEPT": _PLAIN}, start))

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self.close = close

    def shutdown(self) -> None:
        """End the exposition."""
        self.close()
        if self.provider is not None:
            self.provider.shutdown()


def priority_label(priority: int) -> str:
    """Return a request's priority as a label: one of 19 texts."""
    if priority < -MOST_PRIORITY:
        return f"<-{MOST_PRIORITY}"
    return str(priority) if priority <= MOST_PRIORITY else f">{MOST_PRIORITY}"


def setup_metrics(
    config: TelemetryConfig,
    instance: str,
    without_port: bool = False,
    *,
    listens: bool = True,
    model: str = "",
) -> Metrics:
    """Set up metrics of this process, at `http://metrics_host:metrics_port/metrics`.

    Args:
        config: Names the service, the address and the port.
        instance: The process's `service.instance.id`.
        without_port: Record them even without a port, for `Metrics.exposition`.
        listens: Whether to listen on the port already; else `Metrics.listen` does.
        model: The model of measurements that name none, for the metrics of another engine.

    Raises:
        ConfigError: The port is taken, or the address is not this machine's.
    """
    if not (config.metrics_port or without_port):
        return Metrics()
    # Imported only if metrics are on, since the imports take time.
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    provider = MeterProvider(
        [reader], resource_of(config, instance), exemplar_filter=AlwaysOffExemplarFilter()
    )
    aliases = None
    if config.metric_names != "nano":
        from .aliases import open_aliases

        aliases = open_aliases(config.metric_names, registry, model)
    metrics = Metrics(provider, registry=registry, aliases=aliases)
    if listens:
        try:
            metrics.listen(config)
        except ConfigError:
            provider.shutdown()
            raise
    return metrics


def _dropped_lines(options: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for reason, lines in dropped_lines.items():
        yield Observation(lines, {names.LOG_REASON: reason})


def _both(
    record: Callable[[float, Labels], None], alias: Callable[[float, Labels], None] | None
) -> Callable[[float, Labels], None]:
    if alias is None:
        return record

    def record_both(value: float, labels: Labels) -> None:
        record(value, labels)
        alias(value, labels)

    return record_both


def _recorder(meter: Meter, instrument: Instrument) -> Callable[[float, Labels], None]:
    about = (instrument.name, instrument.unit, instrument.description)
    match instrument.kind:
        case "counter":
            return meter.create_counter(*about).add
        case "gauge":
            return meter.create_gauge(*about).set
    return meter.create_histogram(
        *about, explicit_bucket_boundaries_advisory=instrument.buckets
    ).record
