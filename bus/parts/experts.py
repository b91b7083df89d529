"""Mixtures of experts."""

from __future__ import annotations

from ..control import InternalPart
from ..sections import Section

EXPERTS_DTYPE = "<u2"
"""Numpy's name of the type of packed experts."""


class ExpertCapacity(Section, frozen=True):
    """In ReplicaCapacity: experts per layer.

    Attributes:
        number: Experts of a layer.
        layers: Layers of the model, those without experts included.
        top_k: Experts of a token in a layer.
        why_not_reported: Why routed experts can't be reported; "" if they can.
    """

    number: int
    layers: int = 0
    top_k: int = 0
    why_not_reported: str = ""


class PromptExperts(InternalPart, frozen=True, array_like=True):
    """Routed experts at positions of a prompt, from one step.

    Attributes:
        seq_id: The sequence, always the first sample of its request.
        first: The first position.
        layers, top_k: As in ExpertCapacity.
        data: `[positions, layers, top_k]`, of EXPERTS_DTYPE.
        ended: Whether all positions before the prompt's last one are reported.
    """

    seq_id: int
    first: int
    layers: int
    top_k: int
    data: bytes
    ended: bool


class RoutedPrompts(Section, frozen=True):
    """In StepResult: for sequences that report the experts of their prompts."""

    prompts: tuple[PromptExperts, ...]

    def concerns(self, seq_ids: set[int]) -> bool:
        return any(each.seq_id in seq_ids for each in self.prompts)
