"""Token trees of sessions."""

from __future__ import annotations

from typing import ClassVar

from ....bus.control import ReplicaCapacity
from ....bus.entries import RequestEntry
from ....bus.messages import Prompt
from ....bus.parts.trees import TreeTurn
from ....bus.pooling import Pooling
from ....bus.public import GenerateRequest, TreeSession
from ....bus.trees import check_session_id
from ....config import RequestError, SamplingParams
from . import Part


class Trees(Part):
    """Checks turns of sessions, and names their session to streaming."""

    fields: ClassVar = ("session",)

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
        """Raises RequestError: invalid_session."""
        assert request.session is not None
        check_session_id(request.session.id)
        if request.embed is not None:
            raise RequestError(
                "an embedding is no turn of a session; leave out embed or session",
                code="invalid_session",
            )

    def opened(
        self,
        entry: RequestEntry,
        request: GenerateRequest,
        adapter: str,
        prompt: Prompt,
        sampling: SamplingParams,
        pooling: Pooling | None,
        seeds: tuple[int, ...],
    ) -> TreeTurn | None:
        if (session := request.session) is None:
            return None
        return TreeTurn(
            TreeSession(
                id=session.id, tenant=request.tenant, note=session.note, images=prompt.media
            )
        )
