"""A stream's chunks: what is new of each choice, as fast as the client reads."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from ...bus.public import Completion, CompletionChunk, CompletionSample, FinishReason, Output
from ..http import SendEvent
from ..samples import MOST_UNSENT
from .answers import Answer, Answers, unbegun, usage_of, version_spans
from .logprobs import Scored, scored
from .positions import FINISHED, UNBEGUN, Position


class Choice:
    """What has come of a choice and was not sent yet.

    Attributes:
        index: The choice's, in the answer.
        begun: Whether a chunk of it was sent.
        finished: Whether its last chunk was put together.
        taken: How many tokens have come.
        sent: How many were sent, as in a `Position`.
    """

    def __init__(self, answers: Answers, prompt: int, sample: int, after: int = UNBEGUN) -> None:
        """`after`: what was sent of it before, which comes again and is not sent again.

        A chunk on the bus is never cut by that: an event holds whole ones.
        """
        self._answers = answers
        self._prompt = prompt
        self.index = prompt * answers.call.n + sample
        texts = answers.call.kind == "completions"
        self._logprobs = answers.completion_logprobs() if texts else None
        self._texts: list[str] = []
        self._text_chars = 0
        self._tokens: list[Scored] = []
        self._spans: list[tuple[int, int]] = []
        self._version: int | None = None
        self._sent_tokens = 0
        self._sent_before = max(0, after)
        # What was sent before, until the offsets of what follows are known.
        self._skipped: list[Scored] = []
        self._skips_prompt = after != UNBEGUN
        self._reason: FinishReason | None = None
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
        told = (texts_shown and bool(self._texts)) or (tokens_shown and bool(self._tokens))
        return told or self._reason is not None

    @property
    def unsent(self) -> int:
        """Tokens that have come and were not sent."""
        return len(self._tokens)

    @property
    def sent(self) -> int:
        if self.finished and self._reason is None:
            return FINISHED
        return self._sent_tokens if self.begun else UNBEGUN

    def score_prompt(self, tokens: list[Scored]) -> None:
        """The prompt's tokens, which its first chunk shows."""
        self._scored_prompt = tokens

    def add(self, chunk: CompletionChunk) -> None:
        """Takes the next tokens."""
        scores_only = self._answers.call.scores_only
        if self.finished:  # by what was sent before
            self.taken += 0 if scores_only else len(chunk.token_ids)
            return
        if not scores_only:
            tokens = scored(chunk.token_ids, chunk.logprobs, chunk.top_logprobs)
            self._take(chunk.text, tokens, chunk.weight_version)
        if chunk.finish_reason is not None:
            self._end(chunk.finish_reason)

    def end(self, sample: CompletionSample) -> None:
        """Takes what was not told in chunks, of a sample that has ended."""
        if self._reason is not None or self.finished:
            return
        if not self._answers.call.scores_only:
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
        """A chunk of all that has come and was not sent yet."""
        call, answers = self._answers.call, self._answers
        text, tokens = "".join(self._texts), self._tokens
        reason, self._reason = self._reason, None
        choice: Answer = {"index": self.index}
        first = not self.begun
        if call.chat:
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
        self._sent_tokens += len(tokens)
        if self._spans:
            self._version = self._spans[-1][0]
        self._texts, self._tokens, self._spans = [], [], []
        return choice

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
        self.finished = True


class Chunks:
    """All choices of a stream. What has come of one while the client did not read is one chunk.

    Attributes:
        position: How much was sent.
    """

    def __init__(self, answers: Answers, send: SendEvent, after: Position | None = None) -> None:
        """`after`: what a client has of the stream, which is given all outputs nevertheless."""
        self._answers = answers
        self._send = send
        call = answers.call
        prompts = len(answers.prompts)
        self.position = after or Position(call.id, prompts * call.n)
        self._choices = [
            [
                Choice(answers, prompt, sample, self.position[prompt * call.n + sample])
                for sample in range(call.n)
            ]
            for prompt in range(prompts)
        ]
        self._completions: list[Completion] = []
        self._due: dict[Choice, None] = {}
        self._scores_prompt = call.echo and call.logprobs is not None
        self._scored: set[int] = set()
        self._changed = anyio.Event()
        self._unsent = 0
        self._read = anyio.Event()
        self._closed = False
        self._begun = any(choice.begun for choices in self._choices for choice in choices)

    def put(self, prompt: int, output: Output) -> None:
        """There is something new of a prompt's choices."""
        choices = self._choices[prompt]
        touched = choices if isinstance(output, Completion) else [choices[output.sample_index]]
        before = sum(choice.unsent for choice in touched)
        if self._scores_prompt and prompt not in self._scored:
            tokens = self._answers.scored_prompt(prompt, output)
            if tokens or isinstance(output, Completion):
                self._scored.add(prompt)
                for choice in choices:
                    choice.score_prompt(tokens)
        if isinstance(output, CompletionChunk):
            choices[output.sample_index].add(output)
        else:
            self._completions.append(output)
            ended = {sample.sample_index: sample for sample in output.samples}
            for index, choice in enumerate(choices):
                choice.end(ended.get(index, unbegun(index)))
        # A choice begins with its prompt, of which the first sample tells.
        if not self._scores_prompt or prompt in self._scored:
            self._due |= dict.fromkeys(choice for choice in choices if choice.due)
        self._unsent += sum(choice.unsent for choice in touched) - before
        if self._due:
            self._changed.set()

    async def room(self) -> None:
        """Waits while too much waits for the client."""
        while self._unsent > MOST_UNSENT and self._due:
            if self._read.is_set():
                self._read = anyio.Event()
            await self._read.wait()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._changed.set()

    async def send_all(self) -> None:
        """Sends until it is closed and everything is sent."""
        while self._due or not self._closed:
            if not self._due:
                self._changed = anyio.Event()
                await self._changed.wait()
                continue
            choice = next(iter(self._due))
            if self._answers.call.chat:
                # All of them in order, which is what clients count on.
                for each in self._choices[0]:
                    if not each.begun:
                        await self._send_choice(each, each.role(), choice.version)
            # Only now: what came while the roles were sent is taken along.
            del self._due[choice]
            version = choice.version
            self._unsent -= choice.unsent
            self._read.set()
            await self._send_choice(choice, choice.take(), version)
            # The server takes what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()

    async def send_usage(self) -> None:
        """The last chunk, when it was asked for."""
        if self._answers.call.usage and not self.position.usage:
            self.position.usage = True
            usage = self._answers.usage(self._completions)
            chunk = self._answers.head(self._version(), chunk=True)
            await self._encode(chunk | {"choices": [], "usage": usage})

    async def _send_choice(self, choice: Choice, answer: Answer, version: int | None) -> None:
        call = self._answers.call
        chunk = self._answers.head(version, chunk=True) | {"choices": [answer]}
        if call.chat and call.token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._answers.prompts[0]
        self._begun = True
        if call.usage:
            chunk["usage"] = self._usage_so_far() if call.continuous_usage else None
        self.position.move(choice.index, choice.sent)
        await self._encode(chunk)

    def _usage_so_far(self) -> Answer:
        prompt = sum(map(len, self._answers.prompts))
        made = sum(choice.taken for choices in self._choices for choice in choices)
        return usage_of(prompt, made)

    def _version(self) -> int | None:
        made = [
            sample.weight_version
            for completion in self._completions
            for sample in completion.samples
            if sample.token_ids
        ]
        return min(made, default=None)

    async def _encode(self, chunk: dict[str, Any]) -> None:
        await self._send(msgspec.json.encode(chunk), self.position.event_id)
