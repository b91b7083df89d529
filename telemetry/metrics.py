"""Metrics of one process, in OpenTelemetry's form, read by Prometheus.

If nothing exposes them nothing is recorded, and a call costs one lookup in an empty dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config import ConfigError, TelemetryConfig
from .instruments import Instrument
from .spans import resource_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from ..bus.public import Completion
    from .aliases import Aliases
    from .measurements import Measurements

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
        measurements: The destination; None for none.
        close: Ends its exposition.
        registry: Reads it.
        aliases: Records the metrics of another engine, too; None for none.
    """

    measurements: Measurements | None = None
    close: Callable[[], None] = lambda: None
    registry: CollectorRegistry | None = None
    aliases: Aliases | None = None

    def __post_init__(self) -> None:
        self._always: Labels = _NO_LABELS
        self._record: dict[str, Callable[[float, Labels], None]] = {}
        if self.measurements is not None:
            self._record = self.measurements.recorders
            if self.aliases is not None:
                self._record = {
                    name: _both(record, self.aliases.recorder(name))
                    for name, record in self._record.items()
                }

    @property
    def enabled(self) -> bool:
        """Whether measurements are recorded."""
        return self.measurements is not None

    def record(self, instrument: Instrument, value: float, labels: Labels = _NO_LABELS) -> None:
        """Add to a counter, set a gauge, or put a value into a histogram.

        Takes a microsecond: fit for a request or a step, not for each token.
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
    from prometheus_client import CollectorRegistry

    from .measurements import Measurements, expose

    registry = CollectorRegistry()
    measurements = Measurements(resource_of(config, instance))
    expose(measurements, registry)
    aliases = None
    if config.metric_names != "nano":
        from .aliases import open_aliases

        aliases = open_aliases(config.metric_names, registry, model)
    metrics = Metrics(measurements, registry=registry, aliases=aliases)
    if listens:
        metrics.listen(config)
    return metrics


def _both(
    record: Callable[[float, Labels], None], alias: Callable[[float, Labels], None] | None
) -> Callable[[float, Labels], None]:
    if alias is None:
        return record

    def record_both(value: float, labels: Labels) -> None:
        record(value, labels)
        alias(value, labels)

    return record_both
