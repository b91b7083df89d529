"""Mixtures of experts."""

from __future__ import annotations

from ..sections import Section


class ExpertCapacity(Section, frozen=True):
    """In ReplicaCapacity: experts per layer."""

    number: int
