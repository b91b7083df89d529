"""Token trees of sessions."""

from __future__ import annotations

from ..public import TreeSession
from ..sections import Section


class TreeTurn(Section, frozen=True):
    """In RequestOpened: the request is a turn of a session, whose token tree keeps it."""

    session: TreeSession
