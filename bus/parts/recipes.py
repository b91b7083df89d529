"""Recipes of completions."""

from __future__ import annotations

from ..public import Fingerprint
from ..sections import Section


class FingerprintCapacity(Section, frozen=True):
    """In ReplicaCapacity: the executor's fingerprint; of several executors each different one."""

    fingerprints: tuple[Fingerprint, ...]
