"""Prefix locality: requests go where their prefix is probably cached."""

from __future__ import annotations

from collections.abc import Sequence

from ....bus.messages import Credit
from ..queue import Running, Waiting
from ..replicas import PrefixIndex, Replica, prefix_chain
from ..state import FairnessState
from . import Part


class Locality(Part):
    """The prefixes that each replica may have cached, also over epochs."""

    def __init__(self, core: FairnessState) -> None:
        super().__init__(core)
        self._prefixes: dict[str, PrefixIndex] = {}

    def pushed(self, waiting: Waiting) -> None:
        if self.core.config.locality_tokens or self.core.has_several:
            request = waiting.request
            waiting.chain = prefix_chain(request.prompt.token_ids, request.cache_scope)

    def joined(self, replica: Replica) -> None:
        replica.prefixes = self._prefixes.setdefault(replica.name, replica.prefixes)

    def absorbed(self, replica: Replica, report: Credit) -> None:
        if not report.keeps_cache:
            replica.prefixes.clear()

    def dispatched(self, waiting: Waiting, replica: Replica, started: Sequence[Running]) -> None:
        if waiting.untouched:
            replica.prefixes.add(waiting.chain)
