"""Sessions: conversations whose KV is kept between turns."""

from __future__ import annotations

from ..public import KVSession
from ..sections import Section


class SessionTurn(Section, frozen=True):
    """In AdmittedRequest: the request is a turn of a session, as in GenerateRequest."""

    session: KVSession
