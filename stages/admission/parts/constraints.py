"""Constraints of the output: their grammars are compiled at admission."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ....bus.control import ReplicaCapacity
from ....bus.entries import Malformed
from ....bus.public import GenerateRequest
from ....config import Config, RequestError
from ....text.grammar import GrammarCompiler, check_size
from . import Part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Constraints(Part):
    """Compiles and checks constraints."""

    fields: ClassVar = ("sampling.constraint",)

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerFast | None) -> None:
        self._engine = config.engine
        self._max_bytes = config.admission.max_constraint_bytes
        self._tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        tokenizer, known = self._tokenizer, self._grammars
        if tokenizer is not None and (known is None or known.vocab_size != capacity.vocab_size):
            self._grammars = GrammarCompiler.of(
                self._engine, capacity.vocab_size, lambda folder: tokenizer
            )

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
        if self._tokenizer is not None and request.sampling.constraint is not None:
            check_size(request.sampling.constraint, self._max_bytes)

    def knows(self, request: GenerateRequest | Malformed) -> bool:
        """Return whether `prepare` is quick: no constraint, or one that was checked before and has
        no tokens to follow."""
        if isinstance(request, Malformed) or request.sampling.constraint is None:
            return True
        if request.sampling.forced_tokens:
            return False
        return self._grammars is not None and self._grammars.knows(request.sampling.constraint)

    def prepare(self, request: GenerateRequest) -> None:
        """Compile and check a request's constraint.

        Raises:
            RequestError: invalid_constraint, invalid_forced_tokens.
        """
        assert request.sampling.constraint is not None, "only a request with one"
        assert self._grammars is not None, "set_capacity and check come before"
        constraint, forced = request.sampling.constraint, request.sampling.forced_tokens
        self._grammars.check(constraint)
        if forced and (allowed := self._grammars.num_allowed(constraint, forced)) < len(forced):
            raise RequestError(
                f"forced_tokens can't follow the prompt: the constraint forbids token "
                f"{forced[allowed]} at position {allowed}; leave out one of both",
                code="invalid_forced_tokens",
            )
