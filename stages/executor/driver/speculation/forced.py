"""Drafts of what a grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..constraints import Constraints
from .drafts import NO_DRAFT, Draft, DraftContext


class ForcedSource:
    """The tokens by which a constrained text can only go on, in their usual form.

    A model may write the same text in other tokens, so even these have to be verified.
    """

    name: ClassVar[str] = "grammar"

    def __init__(self, constraints: Constraints) -> None:
        self._constraints = constraints

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._propose(context) for context in contexts]

    def forget(self, row: int, seq_id: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def _propose(self, context: DraftContext) -> Draft:
        tokens = self._constraints.forced(context.row)[: context.limit]
        return Draft(tokens, source=self.name) if tokens else NO_DRAFT
