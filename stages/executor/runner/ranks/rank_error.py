"""The error of a group of ranks."""

from __future__ import annotations


class RankError(Exception):
    """A rank has ended, does not answer, or is out of step. The group can't be used any more."""
