"""A stream's chunks: what is new of each choice, as fast as the client reads."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import msgspec

from ....bus.public import Completion, CompletionChunk, Output
from ...server.http import SendEvent
from ...serving.samples import MOST_UNSENT
from .answers import Answer, Answers, unbegun, usage_of
from .choices import Choice
from .positions import Position


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
            version, unsent = choice.version, choice.unsent
            answer = choice.take()
            self._unsent -= unsent - choice.unsent
            if choice.due:
                self._due[choice] = None
            self._read.set()
            await self._send_choice(choice, answer, version)
            # The server takes what fits its buffers without a pause.
            await anyio.lowlevel.checkpoint()

    async def send_usage(self) -> None:
        """The last chunk, when it was asked for."""
        if self._answers.call.usage and not self.position.usage:
            self.position.usage = True
            usage = self._answers.usage(self._completions, self._reasoning_tokens())
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
        return usage_of(prompt, made, reasoning_tokens=self._reasoning_tokens())

    def _reasoning_tokens(self) -> int | None:
        if self._answers.call.reading is None:
            return None
        return sum(choice.reasoning_tokens for choices in self._choices for choice in choices)

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
