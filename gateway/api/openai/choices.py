"""A choice of a stream: what is new of it."""

from __future__ import annotations

from ....bus.public import CompletionChunk, CompletionSample, FinishReason
from ....text.messages import Delta
from ...serving.logprobs import Scored, scored
from ...serving.message_parts import NewParts
from .answers import Answer, Answers, version_spans
from .deltas import chunk_delta, finish_reason, fitting
from .positions import FINISHED, UNBEGUN


class Choice:
    """What has come of a choice and was not sent yet.

    Attributes:
        index: The choice's, in the answer.
        begun: Whether a chunk of it was sent.
        finished: Whether its last chunk was put together.
        taken: How many tokens have come, and their text with them where the answer shows both.
        sent: How many were sent, as in a `Position`.
    """

    def __init__(self, answers: Answers, prompt: int, sample: int, after: int = UNBEGUN) -> None:
        """`after`: what was sent of it before, which comes again and is not sent again.

        Where text goes out as it comes, a chunk on the bus is never cut by that: an event holds
        whole ones. Where parts are read, that is so of tokens.
        """
        self._answers = answers
        self._prompt = prompt
        self.index = prompt * answers.call.n + sample
        self._parts = answers.parts(self.index, told=after != FINISHED)
        # By the places of the tokens that brought them.
        self._deltas: list[tuple[int, Delta]] = []
        texts = answers.call.kind == "completions"
        self._logprobs = answers.completion_logprobs() if texts else None
        self._texts: list[str] = []
        self._text_chars = 0
        self._tokens: list[Scored] = []
        self._spans: list[tuple[int, int]] = []
        self._version: int | None = None
        self._sent_tokens = 0
        self._sent_before = self._passed = max(0, after)
        # What was sent before, until the offsets of what follows are known.
        self._skipped: list[Scored] = []
        self._skips_prompt = after != UNBEGUN
        self._reason: str | None = None
        self._scored_prompt: list[Scored] = []
        self.begun = after != UNBEGUN
        self.finished = after == FINISHED
        self.taken = 0

    @property
    def version(self) -> int | None:
        """Of the weights that made the first of the tokens not sent yet, or the last sent."""
        return self._spans[0][0] if self._spans else self._version

    @property
    def due(self) -> bool:
        """Whether there is anything to show."""
        call = self._answers.call
        tokens_shown = call.logprobs is not None or call.token_ids or call.weight_versions
        texts_shown = call.kind != "generate"
        texts = texts_shown and bool(self._texts or self._deltas)
        return texts or (tokens_shown and bool(self._tokens)) or self._reason is not None

    @property
    def unsent(self) -> int:
        """Tokens that have come and were not sent."""
        return len(self._tokens)

    @property
    def reasoning_tokens(self) -> int:
        """How many of those that have come are reasoning, as far as that is read."""
        return self._parts.reasoning_tokens if self._parts else 0

    @property
    def sent(self) -> int:
        if self.finished and self._reason is None:
            return FINISHED
        return max(self._sent_tokens, self._passed) if self.begun else UNBEGUN

    def score_prompt(self, tokens: list[Scored]) -> None:
        """The prompt's tokens, which its first chunk shows."""
        self._scored_prompt = tokens

    def add(self, chunk: CompletionChunk) -> None:
        """Takes the next tokens."""
        scores_only = self._answers.call.scores_only
        if self._parts is not None:
            self._absorb(self._parts.add(chunk))
        elif self.finished:  # by what was sent before
            self.taken += 0 if scores_only else len(chunk.token_ids)
        elif not scores_only:
            tokens = scored(chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
            self._take(chunk.text, tokens, chunk.weight_version)
        if chunk.finish_reason is not None and not self.finished:
            self._end(chunk.finish_reason)

    def end(self, sample: CompletionSample) -> None:
        """Takes what was not told in chunks, of a sample that has ended."""
        if self._parts is not None:
            self._absorb(self._parts.end(sample))
        if self.finished:
            return
        if self._parts is None and not self._answers.call.scores_only:
            tokens = scored(sample.token_ids, sample.logprobs, sample.top_logprobs)
            text = sample.text[self._text_chars :]
            spans = version_spans(sample.weight_versions, self.taken, len(tokens))
            for span in spans:
                self._take("", tokens[span["start"] : span["end"]], span["version"])
            self._take(text, [], sample.weight_version)
        self._end(sample.finish_reason)

    def role(self) -> Answer:
        """The first chunk of a chat's choice."""
        self.begun = True
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def take(self) -> Answer:
        """A chunk of all that has come and was not sent yet, or of what has to stand before the
        rest; then it is still due."""
        call, answers = self._answers.call, self._answers
        deltas, tokens = self._next() if self._deltas else ([], self._tokens)
        text = "".join(self._texts if self._parts is None else [each.content for each in deltas])
        reason = None
        # Clients take a call for complete when a chunk without calls comes, the reason's as well.
        if not self._deltas and not any(delta.calls for delta in deltas):
            reason, self._reason = self._reason, None
        choice: Answer = {"index": self.index}
        first = not self.begun
        if call.chat:
            if call.reading is not None:
                choice["delta"] = chunk_delta(deltas, answers.shown_reasoning)
            else:
                choice["delta"] = {"content": text} if text or reason is None else {}
            choice["logprobs"] = answers.listed_logprobs(tokens) if tokens else None
        elif call.kind == "generate":
            choice["logprobs"] = answers.listed_logprobs(tokens)
        else:
            choice["text"] = (answers.echoed(self._prompt) if first else "") + text
            choice["logprobs"] = self._completion_logprobs(tokens)
        choice["finish_reason"] = reason
        if call.token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
            if first and call.kind == "completions":
                choice["prompt_token_ids"] = answers.prompts[self._prompt]
        if call.weight_versions:
            start, end = self._sent_tokens, self._sent_tokens + len(tokens)
            choice["weight_versions"] = version_spans(self._spans, start, end)
        self.begun = True
        self._texts = []
        self._pass(len(tokens))
        return choice

    def _absorb(self, new: NewParts) -> None:
        """Takes what was read."""
        if self.finished:  # by what was sent before
            self.taken += len(new.records)
            return
        for record in new.records:
            token = Scored(record.token_id, record.logprob, record.top)
            self._take("", [token], record.version)
        for place, delta in zip(new.places, new.deltas, strict=True):
            if not self._answers.shown_reasoning:
                delta = delta._replace(reasoning="")
            if any(delta) and place >= self._sent_before:
                self._deltas.append((place, delta))

    def _next(self) -> tuple[list[Delta], list[Scored]]:
        """What stands in the next chunk, of which the deltas are taken."""
        deltas = [delta for _, delta in self._deltas]
        number = fitting(deltas)
        tokens = self._tokens
        if number < len(deltas):
            tokens = tokens[: self._deltas[number][0] - self._sent_tokens]
        # Behind what the end brings: by one more than there are tokens.
        self._passed = self._deltas[number - 1][0] + 1
        self._deltas = self._deltas[number:]
        return deltas[:number], tokens

    def _pass(self, number: int) -> None:
        """So many tokens are sent, the first of those that are there."""
        if number == len(self._tokens):
            self._version = self._spans[-1][0] if self._spans else self._version
            self._tokens, self._spans = [], []
        else:
            left = version_spans(self._spans, self._sent_tokens + number, self.taken)
            self._tokens = self._tokens[number:]
            self._spans = [(span["version"], span["start"]) for span in left]
        self._sent_tokens += number

    def _take(self, text: str, tokens: list[Scored], version: int) -> None:
        if tokens and (not self._spans or self._spans[-1][0] != version):
            self._spans.append((version, self.taken))
        if text:
            self._texts.append(text)
            self._text_chars += len(text)
        self._tokens += tokens
        self.taken += len(tokens)
        if tokens and self.taken <= self._sent_before:
            self._skip()

    def _skip(self) -> None:
        """What has come was sent before."""
        if self._logprobs is not None:
            self._skipped += self._tokens
        self._sent_tokens = self.taken
        self._version = self._spans[-1][0]
        self._texts, self._tokens, self._spans = [], [], []

    def _completion_logprobs(self, tokens: list[Scored]) -> Answer | None:
        """Of the prompt, if it is to be shown, and of these tokens."""
        if self._logprobs is None:
            return None
        if self._skips_prompt:
            self._logprobs.add([*self._scored_prompt, *self._skipped])
            self._skips_prompt, self._scored_prompt, self._skipped = False, [], []
        shown, self._scored_prompt = [*self._scored_prompt, *tokens], []
        return self._logprobs.add(shown) if shown else None

    def _end(self, reason: FinishReason) -> None:
        scores_only = self._answers.call.scores_only
        self._reason = "length" if scores_only and reason != "abort" else reason
        if self._parts is not None:
            self._reason = finish_reason(self._reason, self._parts)
        self.finished = True
