"""Sessions: conversations whose KV is kept between turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ....bus.control import ReplicaCapacity
from ....bus.parts.sessions import SessionTurn
from ....bus.public import GenerateRequest
from ....config import RequestError, shown
from ....text.image_tokens import Expanded
from ..arrivals import PromptImage
from ..prompts import PromptReader
from . import Part

MAX_SESSION_ID_LENGTH = 128


class Sessions(Part):
    """Checks turns of sessions."""

    fields: ClassVar = ("kv_session",)

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
        """Raises RequestError: invalid_kv_session."""
        session, wrong = request.kv_session, ""
        assert session is not None
        if not (0 < len(session.id) <= MAX_SESSION_ID_LENGTH and session.id.isprintable()):
            most = MAX_SESSION_ID_LENGTH
            wrong = f"its id is {shown(session.id)}; it must be 1 to {most} printable characters"
        elif request.n != 1:
            wrong = f"a turn has one sample, and n is {shown(request.n)}; set n to 1"
        elif request.embed is not None:
            wrong = "an embedding is no turn; leave out embed or kv_session"
        if wrong:
            raise RequestError(f"kv_session can't be used: {wrong}", code="invalid_kv_session")

    def read(
        self, reader: PromptReader, prompt: Expanded, media: Sequence[PromptImage]
    ) -> SessionTurn:
        assert reader.request.kv_session is not None
        return SessionTurn(reader.request.kv_session)
