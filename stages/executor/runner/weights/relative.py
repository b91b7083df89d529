"""New weights that rest on others: deltas, and versions of the log."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from .....bus.weights import ArcWeights, PastWeights
from .....config import WeightsError
from ..shards import NewWeight
from .checks import check_stored
from .in_place import base_of
from .logged import LoggedWeights
from .received_delta import ReceivedDelta
from .sync_manager import WeightSyncManager


class Relative(NamedTuple):
    """Prepared weights; the fields are the first of `Fetched`."""

    tensors: Mapping[str, NewWeight]
    origin: None
    covers: bool
    converted: bool = True
    base: int | None = None
    delta_amount: tuple[int, int] | None = None


def fetch_relative(
    source: ArcWeights | PastWeights, manager: WeightSyncManager, log: LoggedWeights | None
) -> Relative:
    """Return the weights of a source.

    Raises:
        WeightsError: They can't be read, or rest on other weights than those in place.
    """
    if isinstance(source, ArcWeights):
        from .arc import changed_by_arc

        manager.check_base(source.base_version)
        changed = changed_by_arc(source.path, source.format, partial(base_of, manager))
        prepared = manager.prepare(changed)
        return Relative(prepared, None, manager.covers(prepared), base=source.base_version)
    if log is None:
        raise WeightsError(
            "there is no log of weights to roll back with; set engine.weight_log",
            code="weights_unlogged",
        )
    prepared = manager.prepare(log.weights(source.version, source.run))
    return Relative(prepared, None, manager.covers(prepared))


def fetch_delta(payload: Mapping[str, NewWeight], manager: WeightSyncManager) -> Relative:
    """Return the weights of a delta that has come. Raises WeightsError as `fetch_relative`."""
    check_stored(payload)
    received = ReceivedDelta(payload, manager)  # type: ignore[arg-type]
    prepared = manager.prepare(received.new_weights())
    delta = received.delta
    base, amount = delta.head.base_version, (delta.num_bytes, delta.elements)
    return Relative(prepared, None, covers=False, base=base, delta_amount=amount)
