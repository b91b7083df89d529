"""Constraints of samples. Grammars, and the model's vocabulary in them, load with the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ....bus.control import Cancel
from ....config import EngineConfig
from .sequences import Places, SequenceTable

if TYPE_CHECKING:
    from .grammar_masks import GrammarMasks, PendingMasks


class Constraints:
    """The grammars of constrained samples; nothing for all others. GrammarMasks has the rest.

    Attributes:
        table: The sequences.
        masks: None before the first constraint.
    """

    def __init__(
        self,
        table: SequenceTable,
        config: EngineConfig,
        vocab_size: int,
        now_ns: Callable[[], int],
    ) -> None:
        self.table = table
        self.masks: GrammarMasks | None = None
        self._model = config, vocab_size
        self._now_ns = now_ns

    def make_ready(self) -> None:
        """Prepare the vocabulary before requests arrive."""
        self._load().compiler.make_ready()

    @property
    def in_use(self) -> bool:
        """Whether samples may have left whose matchers take memory."""
        return self.masks is not None and bool(self.masks.samples)

    def begin(self, places: Places) -> PendingMasks | None:
        """Start to compute masks; see `GrammarMasks.begin`."""
        return self._load().begin(places)

    def check_draft(self, row: int, draft: tuple[int, ...]) -> int:
        """Return how many leading tokens of a draft a row's grammar allows."""
        return self._load().check_draft(row, draft) if self.table.constrained[row] else len(draft)

    def forced(self, row: int) -> tuple[int, ...]:
        """Return the tokens that a row's grammar forces next, as far as they are known."""
        return self._load().forced(row) if self.table.constrained[row] else ()

    def take_waits_ns(self) -> list[int]:
        """Return the waiting times for masks since the last call; from any thread."""
        return [] if self.masks is None else self.masks.take_waits_ns()

    def take_failures(self) -> tuple[Cancel, ...]:
        """Return cancellations of requests whose constraints failed, each once."""
        return () if self.masks is None else self.masks.take_failures()

    def clear(self) -> None:
        """Drop all samples."""
        if self.masks is not None:
            self.masks.clear()

    def close(self) -> None:
        """End the thread."""
        if self.masks is not None:
            self.masks.close()

    def _load(self) -> GrammarMasks:
        if self.masks is None:
            from ....text.grammar import GrammarCompiler
            from .grammar_masks import GrammarMasks

            compiler = GrammarCompiler.of(*self._model)
            self.masks = GrammarMasks(self.table, compiler, self._now_ns)
        return self.masks
