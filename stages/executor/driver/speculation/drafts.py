"""What a source of drafts is: guesses at how sequences go on, which may be wrong at no risk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec

from .....bus.messages import CacheScope
from ...runner.interface import IntArray


class DraftContext(msgspec.Struct, frozen=True):
    """A sequence for which a draft is wanted.

    Attributes:
        row: Its row in the SequenceTable.
        seq_id: Tells it from others that had the row before.
        tokens: `[known]`, prompt and generated tokens; a view that holds for this step only.
        num_prompt: How many of them are the prompt.
        scope: Sequences learn only from those of the same scope.
        prediction: What the client expects to come.
        limit: Most tokens that the draft may have, at least 1.
    """

    row: int
    seq_id: int
    tokens: IntArray
    num_prompt: int
    scope: CacheScope
    prediction: tuple[int, ...]
    limit: int


class Draft(msgspec.Struct, frozen=True):
    """Drafted tokens of one sequence.

    Attributes:
        tokens: The guess; empty for none.
        likelihoods: How likely the source finds each token, given that those before it are right;
            a single one where all are as likely, none where it has no opinion.
        source: Whose guess it is.
    """

    tokens: tuple[int, ...] = ()
    likelihoods: tuple[float, ...] = ()
    source: str = ""


NO_DRAFT = Draft()


class DraftSource(Protocol):
    """Guesses how sequences go on.

    Nothing that it says can change a token, so it may forget what it likes, and know nothing of
    preemptions and failures. It must not take long: everybody waits for it.
    """

    name: ClassVar[str]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """A draft for each sequence, of at most `limit` tokens each; NO_DRAFT where it has none."""
        ...

    def forget(self, row: int, seq_id: int) -> None:
        """A sequence is about to leave the table; what others may learn from it may stay."""
        ...

    def clear(self) -> None:
        """All sequences have left."""
        ...
