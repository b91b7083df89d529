"""Constraints of a simulation: the real grammars, without the process that tries each one first."""

from __future__ import annotations

from functools import cache
from typing import Any

from nano_inference.config import Constraint, EngineConfig
from nano_inference.text.grammar import GrammarCompiler
from nano_inference.text.tokenizer import find_tokenizer

from . import model

PATTERNS = ("[a-e]{2,6}", "(red|green|blue)[0-9]", "-?[1-9][0-9]{0,3}")
"""Patterns of constrained requests."""

_ALLOWED = 200
"""llguidance's bias of an allowed token."""


class TriedCompiler(GrammarCompiler):
    """A compiler whose constraints are harmless.

    What it knows does not depend on other compilers of this process, which share grammars.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._known: set[Constraint] = set()

    def check(self, constraint: Constraint) -> None:
        self.matcher(constraint)
        self._known.add(constraint)

    def knows(self, constraint: Constraint) -> bool:
        return constraint in self._known


@cache
def compiler() -> TriedCompiler:
    """Return the compiler of executors and checks. Admission's path depends on what its own one
    knows."""
    found = find_tokenizer(EngineConfig().model_folder)
    assert found is not None, "the bundled model has a tokenizer"
    return TriedCompiler(EngineConfig().model_folder, model.VOCAB_SIZE, lambda folder: found)


def stop_ids() -> frozenset[int]:
    """Return the tokens that end a constrained sample."""
    compiler().make_ready()
    return frozenset(compiler().stop_ids)


class Constrained:
    """The position of a sample in its grammar."""

    def __init__(self, constraint: Constraint, generated: tuple[int, ...] = ()) -> None:
        """`generated`: the sample's tokens so far."""
        self._matcher: Any = compiler().matcher(constraint)
        if generated:
            self._matcher.consume_tokens(list(generated))

    def allowed(self) -> list[int]:
        """Return the tokens that may come next."""
        bias = self._matcher.compute_logit_bias()
        found = [token for token, each in enumerate(bias) if each == _ALLOWED]
        assert found, "a sample has ended, and goes on"
        return found

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)
