"""Limits of how old a sample may become while it is generated."""

from __future__ import annotations

from ..public import OnVersionLag
from ..sections import Section


class VersionLagLimit(Section, frozen=True):
    """In RequestOpened: most versions that a sample's oldest token may be behind the newest, and
    what happens beyond that."""

    most: int
    beyond: OnVersionLag
