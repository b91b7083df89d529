"""A stream's chunks: what is new of each choice, as fast as the client reads."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from ...bus.public import Completion, CompletionChunk, CompletionSample, FinishReason, Output
from ..http import SendEvent
from .answers import Answer, Answers, unbegun, usage_of, version_spans
from .logprobs import Scored, scored


class Choice:
    """What has come of a choice and was not sent yet.

    Attributes:
        begun: Whether a chunk of it was sent.
        finished: Whether its last chunk was put together.
        taken: How many tokens have come.
    """

    def __init__(self, answers: Answers, prompt: int, sample: int) -> None:
        self._answers = answers
        self._prompt = prompt
        self._index = prompt * answers.call.n + sample
        texts = answers.call.kind == "completions"
        self._logprobs = answers.completion_logprobs() if texts else None
        self._texts: list[str] = []
        self._text_chars = 0
        self._tokens: list[Scored] = []
        self._spans: list[tuple[int, int]] = []
        self._version: int | None = None
        self._sent_tokens = 0
        self._reason: FinishReason | None = None
        self._scored_prompt: list[Scored] = []
        self.begun = False
        self.finished = False
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

    def score_prompt(self, tokens: list[Scored]) -> None:
        """The prompt's tokens, which its first chunk shows."""
        self._scored_prompt = tokens

    def add(self, chunk: CompletionChunk) -> None:
        """Takes the next tokens."""
        if not self._answers.call.scores_only:
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
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def take(self) -> Answer:
        """A chunk of all that has come and was not sent yet."""
        call, answers = self._answers.call, self._answers
        text, tokens = "".join(self._texts), self._tokens
        reason, self._reason = self._reason, None
        choice: Answer = {"index": self._index}
        first = not self.begun
        if call.chat:
            choice["delta"] = {"content": text} if text or reason is None else {}
            choice["logprobs"] = answers.listed_logprobs(tokens) if tokens else None
        elif call.kind == "generate":
            choice["logprobs"] = answers.listed_logprobs(tokens)
        else:
            choice["text"] = (answers.echoed(self._prompt) if first else "") + text
            shown = [*self._scored_prompt, *tokens]
            choice["logprobs"] = self._logprobs.add(shown) if self._logprobs and shown else None
            self._scored_prompt = []
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

    def _end(self, reason: FinishReason) -> None:
        scores_only = self._answers.call.scores_only
        self._reason = "length" if scores_only and reason != "abort" else reason
        self.finished = True


class Chunks:
    """All choices of a stream. What has come of one while the client did not read is one chunk."""

    def __init__(self, answers: Answers, send: SendEvent) -> None:
        self._answers = answers
        self._send = send
        call = answers.call
        self._choices = [
            [Choice(answers, prompt, sample) for sample in range(call.n)]
            for prompt in range(len(answers.prompts))
        ]
        self._completions: list[Completion] = []
        self._due: dict[Choice, None] = {}
        self._scores_prompt = call.echo and call.logprobs is not None
        self._scored: set[int] = set()
        self._changed = anyio.Event()
        self._closed = False
        self._begun = False

    def put(self, prompt: int, output: Output) -> None:
        """There is something new of a prompt's choices."""
        choices = self._choices[prompt]
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
        if self._due:
            self._changed.set()

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
            del self._due[choice]
            if self._answers.call.chat and not choice.begun:
                # All of them in order, which is what clients count on.
                for each in self._choices[0]:
                    await self._send_choice(each.role(), choice.version)
            version = choice.version
            await self._send_choice(choice.take(), version)
            # The server takes what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()

    async def send_usage(self) -> None:
        """The last chunk, when it was asked for."""
        if self._answers.call.usage:
            usage = self._answers.usage(self._completions)
            chunk = self._answers.head(self._version(), chunk=True)
            await self._encode(chunk | {"choices": [], "usage": usage})

    async def _send_choice(self, choice: Answer, version: int | None) -> None:
        call = self._answers.call
        chunk = self._answers.head(version, chunk=True) | {"choices": [choice]}
        if call.chat and call.token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._answers.prompts[0]
        self._begun = True
        if call.usage:
            chunk["usage"] = self._usage_so_far() if call.continuous_usage else None
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
        await self._send(msgspec.json.encode(chunk))
