"""Metrics of one process, recorded through OpenTelemetry and read by Prometheus.

Where nothing shows them there is no meter, and a call costs one look into an empty dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..config import ConfigError, TelemetryConfig
from . import names
from .instrument import Instrument
from .instruments import INSTRUMENTS, LOG_DROPPED
from .log_output import dropped_lines

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

Labels = Mapping[str, str]

_NO_LABELS: Labels = {}

MOST_PRIORITY = 8
"""Priorities further from 0 share a label: clients choose them, and each label costs memory, here
and in Prometheus."""


class Metrics:
    """Records what the instruments measure. Each process sets up its own."""

    def __init__(
        self,
        provider: MeterProvider | None = None,
        close: Callable[[], None] = lambda: None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Args: where to record to; None: nowhere. What ends the reading of it, and what reads."""
        self._provider = provider
        self._close = close
        self._registry = registry
        self._always: Labels = _NO_LABELS
        self._record: dict[str, Callable[[float, Labels], None]] = {}
        if provider is not None:
            meter = provider.get_meter("nano_inference")
            self._record = {
                instrument.name: _recorder(meter, instrument)
                for instrument in INSTRUMENTS
                if instrument is not LOG_DROPPED
            }
            # Of the process, whatever it serves; read where lines are dropped.
            meter.create_observable_counter(
                LOG_DROPPED.name, [_dropped_lines], LOG_DROPPED.unit, LOG_DROPPED.question
            )

    @property
    def enabled(self) -> bool:
        """Whether anybody can read them."""
        return self._provider is not None

    def record(self, instrument: Instrument, value: float, labels: Labels = _NO_LABELS) -> None:
        """Adds to a counter, sets a gauge, or puts a value in a histogram.

        It takes some microseconds: fit for a request or a step, not for each token.
        """
        record = self._record.get(instrument.name)
        if record is not None:
            record(value, {**self._always, **labels} if self._always else labels)

    def labelled(self, labels: Labels) -> Metrics:
        """The same, where each measurement has these labels besides its own."""
        if not labels or not self.enabled:
            return self
        other = copy.copy(self)
        other._always = {**self._always, **labels}
        return other

    def exposition(self, accept: str) -> tuple[bytes, str] | None:
        """All that Prometheus reads, which takes some milliseconds.

        Args:
            accept: The header of that name, by which it chooses among its formats.

        Returns:
            The text and its media type; None where Prometheus reads nothing.
        """
        if self._registry is None:
            return None
        from prometheus_client.exposition import choose_encoder

        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def shutdown(self) -> None:
        """Nothing can be read from now on."""
        self._close()
        if self._provider is not None:
            self._provider.shutdown()


def priority_label(priority: int) -> str:
    """A request's priority as a label has it: one of 19 texts."""
    if priority < -MOST_PRIORITY:
        return f"<-{MOST_PRIORITY}"
    return str(priority) if priority <= MOST_PRIORITY else f">{MOST_PRIORITY}"


def setup_metrics(config: TelemetryConfig, instance: str, *, without_port: bool = False) -> Metrics:
    """Metrics of this process, at `http://metrics_host:metrics_port/metrics`.

    Args:
        config: Names the service, the address and the port.
        instance: Tells this process from its siblings, as `service.instance.id`.
        without_port: Whether they are recorded without a port too, for `Metrics.exposition`; else
            there are none then.

    Raises:
        ConfigError: The port is taken, or the address is not this machine's.
    """
    if not (config.metrics_port or without_port):
        return Metrics()
    # Only here, so that who wants no metrics does not wait for their imports.
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    provider = _provider(config, instance, registry)
    if not config.metrics_port:
        return Metrics(provider, registry=registry)
    try:
        server, thread = start_http_server(
            config.metrics_port, addr=config.metrics_host, registry=registry
        )
    except OSError as error:
        provider.shutdown()
        raise ConfigError(
            f"telemetry.metrics_port {config.metrics_port} on {config.metrics_host} can't be "
            f"listened on: {error.strerror or error}; take another port, or 0 for no metrics"
        ) from None

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return Metrics(provider, close, registry)


def _provider(config: TelemetryConfig, instance: str, registry: Any) -> MeterProvider:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
    from opentelemetry.sdk.resources import Resource

    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    resource = Resource.create(
        {names.SERVICE_NAME: config.service_name, names.SERVICE_INSTANCE_ID: instance}
    )
    return MeterProvider([reader], resource, exemplar_filter=AlwaysOffExemplarFilter())


def _dropped_lines(options: object) -> Iterator[Observation]:
    from opentelemetry.metrics import Observation

    for reason, lines in dropped_lines.items():
        yield Observation(lines, {names.LOG_REASON: reason})


def _recorder(meter: Meter, instrument: Instrument) -> Callable[[float, Labels], None]:
    name, unit, question = instrument.name, instrument.unit, instrument.question
    if instrument.kind == "counter":
        return meter.create_counter(name, unit, question).add
    if instrument.kind == "gauge":
        return meter.create_gauge(name, unit, question).set
    return meter.create_histogram(
        name, unit, question, explicit_bucket_boundaries_advisory=instrument.buckets
    ).record
