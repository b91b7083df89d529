"""Forks: requests that go on from a token of another request."""

from __future__ import annotations

from ..public import ForkOrigin
from ..sections import Section


class ForkedAt(Section, frozen=True):
    """In RequestOpened: where the request began."""

    origin: ForkOrigin
