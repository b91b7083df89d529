"""Adapters as batching sees them: which there are, and whose KV is whose."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ...bus.control import Cancel
from ...bus.messages import Dispatch, RequestInfo
from ...bus.weights import InFlight
from ...store.board import LoadedAdapter
from .cache import KVCacheManager
from .index import SequenceIndex
from .plans import NextPlan
from .report import Report
from .sequence import Sequence


class Adapters:
    """The versions of the adapters that the executor has, or will have with the next plan."""

    def __init__(self, index: SequenceIndex, cache: KVCacheManager) -> None:
        self._index = index
        self._cache = cache
        self._versions: dict[str, int] = {}

    def set(self, adapters: Iterable[LoadedAdapter]) -> None:
        """What the executor has; no sequence is there."""
        self._versions = {adapter.id: adapter.version for adapter in adapters}

    def in_use(self, id: str) -> bool:
        """Whether a sequence that has not ended has it."""
        return bool(self._of(id))

    def refuse(self, dispatch: Dispatch, cancel: Callable[[Cancel], None], report: Report) -> bool:
        """Ends a request whose adapter is not there; returns whether it did."""
        info = dispatch.info
        if not info.adapter or info.adapter in self._versions:
            return False
        unstarted = not self._index.of_request(info.request_id)
        cancel(msgspec.structs.replace(_unloaded(info), unstarted=unstarted))
        for spec in dispatch.sequences:
            report.leave(spec.seq_id)
        return True

    def stamp(self, seq: Sequence) -> None:
        """Set the version of a sequence's adapter. KV that it has computed so far isn't shared."""
        if id := seq.info.adapter:
            version = self._versions[id]
            seq.info = msgspec.structs.replace(seq.info, adapter_version=version)
            scope = seq.cache_scope._replace(adapter=id, adapter_version=version)
            self._cache.move(seq.lease, scope)

    def change(
        self,
        id: str,
        version: int,
        in_flight: InFlight,
        next_plan: NextPlan,
        cancel: Callable[[Cancel], None],
    ) -> None:
        """As `BatchingCore.change_adapter`."""
        next_plan.adapters[id] = version
        requests = [info for info in self._index.requests() if info.adapter == id]
        if not version:
            self._versions.pop(id, None)
            for info in requests:
                cancel(_aborted(info, "unloaded") if in_flight == "abort" else _unloaded(info))
            return
        self._versions[id] = version
        if in_flight == "abort":
            for info in requests:
                cancel(_aborted(info, "replaced"))
        elif in_flight == "retract":
            next_plan.retract_adapters.add(id)
        elif any(seq.pools for seq in self._of(id)):
            # A prompt's vector has to be of one version.
            next_plan.retract_pooled_adapters.add(id)
        for seq in self._of(id):
            self.stamp(seq)

    def _of(self, id: str) -> list[Sequence]:
        return [seq for seq in self._index if seq.info.adapter == id]


def _aborted(info: RequestInfo, was: str) -> Cancel:
    why = f"the adapter was {was}, and requests in flight were to end"
    return Cancel(info.request_id, info.entry_id, "cancelled", "aborted", why)


def _unloaded(info: RequestInfo) -> Cancel:
    message = (
        f"the adapter {info.adapter!r} is not loaded any more, or could not be had again after a "
        "failure; load it, and ask again"
    )
    return Cancel(info.request_id, info.entry_id, "error", "adapter_unloaded", message)
