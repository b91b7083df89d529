"""How often each model was called, and how long it took: what ModelStatistics tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ....config import NanoInferenceError
from ....kserve.protobuf import message
from ....telemetry import Metrics, instruments, names, now_ns
from ...policy.caller import ANYBODY, Caller
from .served import ModelCall

if TYPE_CHECKING:
    from .service import InferenceService

CANCELLED = "cancelled"
"""What a call is told to have ended with of which nobody waited for the end."""

_FAILED = "internal_error"


class Durations:
    """How often something happened, and how long it took altogether."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        """It took so long once more."""
        self.count += 1
        self.ns += max(0, ns)

    @property
    def told(self) -> dict[str, int]:
        """As both interfaces tell it."""
        return {"count": self.count, "ns": self.ns}


class ModelStatistics:
    """Of one model, since the gateway has begun.

    Attributes:
        success: Calls that ended well, from their arrival to their end.
        fail: Calls that did not.
        queue: Of those that ended well, the time before anything was computed.
        compute: The time after that.
        last_ns: When the last one arrived, since the Unix epoch; 0 before the first.
    """

    __slots__ = ("compute", "fail", "last_ns", "queue", "success")

    def __init__(self) -> None:
        self.success = Durations()
        self.fail = Durations()
        self.queue = Durations()
        self.compute = Durations()
        self.last_ns = 0

    def add(self, total_ns: int, compute_ns: int | None) -> None:
        """A call has ended well.

        Args:
            total_ns: How long it took.
            compute_ns: How much of that was computed; None for all.
        """
        total_ns = max(0, total_ns)
        computed_ns = total_ns if compute_ns is None else min(compute_ns, total_ns)
        self.success.add(total_ns)
        self.queue.add(total_ns - computed_ns)
        self.compute.add(computed_ns)


class Statistics:
    """Of all models of a gateway."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        """Args: `metrics` is where calls are told, too; None for nowhere."""
        self._models: dict[str, ModelStatistics] = {}
        self._metrics = metrics or Metrics()

    def model(self, name: str) -> ModelStatistics:
        """A model's."""
        return self._models.setdefault(name, ModelStatistics())

    @contextmanager
    def measured(self, name: str, call: ModelCall) -> Iterator[None]:
        """Counts a call of a model."""
        found, begun_ns = self.model(name), now_ns()
        found.last_ns = begun_ns
        ended = CANCELLED
        try:
            yield
            ended = ""
        except NanoInferenceError as error:
            ended = error.code
            raise
        except Exception:
            ended = _FAILED
            raise
        finally:
            total_ns = now_ns() - begun_ns
            if ended:
                found.fail.add(total_ns)
            else:
                found.add(total_ns, call.compute_ns)
            labels = {names.REQUEST_MODEL: name, names.ERROR_TYPE: ended}
            self._metrics.record(instruments.MODEL_CALL_DURATION, total_ns / 1e9, labels)


def statistics_json(
    service: InferenceService, name: str = "", version: str = "", caller: Caller = ANYBODY
) -> dict[str, list[dict[str, Any]]]:
    """What HTTP answers when it is asked for the statistics of a model, or with "" of all.

    Raises:
        RequestError: model_not_found, also when the caller may not use it.
    """
    return {
        "model_stats": [
            _told(service.statistics.model(spec.name), spec.name, each)
            for spec in service.specs(name, version, caller)
            for each in spec.versions
            if version in ("", each)
        ]
    }


def encode_statistics(
    service: InferenceService, name: str = "", version: str = "", caller: Caller = ANYBODY
) -> Any:
    """What gRPC answers, a ModelStatisticsResponse. Raises as `statistics_json`."""
    told = statistics_json(service, name, version, caller)
    return message("ModelStatisticsResponse")(**told)


def _told(found: ModelStatistics, name: str, version: str) -> dict[str, Any]:
    nothing = Durations().told
    return {
        "name": name,
        "version": version,
        "last_inference": found.last_ns // 1_000_000,
        "inference_count": found.success.count,
        "execution_count": found.success.count,
        "inference_stats": {
            "success": found.success.told,
            "fail": found.fail.told,
            "queue": found.queue.told,
            # Tensors are read and written while other calls are computed.
            "compute_input": nothing,
            "compute_infer": found.compute.told,
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [],
    }
