"""Handover of sequences to another replica after their first token."""

from __future__ import annotations

from ....bus.parts.handover import HandoversPlan
from . import Part


class Handovers(Part):
    """Accepts plans with handovers. The stage sends the tokens when the step's result is there."""

    reads = HandoversPlan
