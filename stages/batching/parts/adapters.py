"""LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ....bus.control import AdapterReady, Cancel, ReplicaCapacity
from ....bus.messages import AdmittedRequest, RequestInfo
from ....bus.parts.adapters import AdapterCapacity, AdaptersPlan
from ....config import EngineConfig
from ..plans import PlanDraft, aborted
from ..sequence import Sequence
from . import Core, Part


class Adapters(Part):
    """Ends requests whose adapter is not loaded, and keeps KV of different versions apart."""

    handles = (AdapterReady,)

    def __init__(self, core: Core, config: EngineConfig, capacity: ReplicaCapacity) -> None:
        super().__init__(core, config, capacity)
        self._versions: dict[str, int] = {}
        self._changes: dict[str, int] = {}  # for the next plan
        self.restart(capacity)

    def restart(self, capacity: ReplicaCapacity) -> None:
        loaded = AdapterCapacity.find(capacity.parts)
        versions = {each.id: each.version for each in loaded.adapters} if loaded else {}
        for id, _ in self._versions.items() - versions.items():
            self.core.cache.retire_adapter(id)
        self._versions = versions

    def accept(self, request: AdmittedRequest, deadline_ns: int | None) -> bool:
        info = request.info
        if not info.adapter or info.adapter in self._versions:
            return True
        unstarted = not self.core.index.of_request(info.request_id)
        self.core.cancel(msgspec.structs.replace(unloaded(info), unstarted=unstarted))
        return False

    def admit(self, seq: Sequence, request: AdmittedRequest) -> None:
        self._set_version(seq)

    def receive(self, message: AdapterReady, now_ns: int, deadline_ns: int | None) -> None:
        """Put new weights of an adapter in place with the next plan, or (version 0) remove it.

        No sequence that starts from then on finds KV of older weights. Removing an adapter ends its
        requests.
        """
        core, id, version = self.core, message.adapter, message.version
        self._changes[id] = version
        requests = [info for info in core.index.requests() if info.adapter == id]
        if not version:
            self._versions.pop(id, None)
        else:
            self._versions[id] = version
        if message.in_flight == "abort":
            change = "replaced" if version else "unloaded"
            why = f"the adapter was {change}, and requests in flight were to end"
            self._cancel(aborted(info, why) for info in requests)
        elif not version:
            self._cancel(unloaded(info) for info in requests)
        elif message.in_flight == "retract":
            core.recompute(lambda seq: seq.info.adapter == id)
        seqs = [seq for seq in core.index.values() if seq.info.adapter == id]
        if any(seq.pools for seq in seqs):
            core.recompute(lambda seq: seq.pools and seq.info.adapter == id)
        for seq in seqs:
            self._set_version(seq)
        core.cache.retire_adapter(id)

    def is_urgent(self) -> bool:
        return bool(self._changes)

    def planned(self, draft: PlanDraft) -> None:
        if self._changes:
            draft.parts.append(AdaptersPlan(tuple(self._changes.items())))
            self._changes.clear()

    def reset(self) -> None:
        self._changes.clear()

    def _cancel(self, cancels: Iterable[Cancel]) -> None:
        for cancel in cancels:
            self.core.cancel(cancel)

    def _set_version(self, seq: Sequence) -> None:
        """Set the version of a sequence's adapter. KV that it has computed so far isn't shared."""
        if id := seq.info.adapter:
            version = self._versions.get(id, 0)
            scope = seq.cache_scope._replace(adapter=id, adapter_version=version)
            self.core.cache.move(seq.allocation, scope)


def unloaded(info: RequestInfo) -> Cancel:
    """Return the cancellation of a request whose adapter is not loaded."""
    message = (
        f"the adapter {info.adapter!r} is not loaded any more, or could not be had again after a "
        "failure; load it, and ask again"
    )
    return Cancel(info.request_id, info.entry_id, "error", "adapter_unloaded", message)
