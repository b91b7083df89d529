"""Forks: where a request began."""

from __future__ import annotations

from ....bus.control import Cancel
from ....bus.parts.forks import ForkedAt
from ..deliveries import Ending
from ..samples import RequestState
from . import Part


class Forks(Part):
    """Adds where a forked request began to its Completion."""

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        if request is not None and (forked := ForkedAt.find(request.info.parts)) is not None:
            ending.fields["fork"] = forked.origin
