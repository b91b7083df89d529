"""Token trees of sessions."""

from __future__ import annotations

from ....bus.control import Cancel
from ....bus.parts.trees import TreeTurn
from ..deliveries import Ending
from ..samples import RequestState
from . import Part


class Trees(Part):
    """Names a Completion's session, whose token tree keeps it."""

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        if request is not None and (turn := TreeTurn.find(request.info.parts)) is not None:
            ending.fields["session"] = turn.session
