"""The chunks of a stream: what is new of each choice, as fast as the client reads."""

from __future__ import annotations

from typing import Any

import msgspec

from ....bus.public import Completion, Output
from ...call import Account
from ...server.http import SendEvent
from ...serving.samples import Unsent
from .answers import Answer, Choice, ChoicesWriter, oldest_version, usage_of
from .positions import Position


class Chunks(Unsent[Choice]):
    """All choices of a stream. All that comes of one while the client does not read is one chunk.

    Attributes:
        position: The position up to which it was sent.
    """

    def __init__(
        self, answers: ChoicesWriter, send: SendEvent, after: Position | None = None
    ) -> None:
        """Args: `after` is the client's position in the stream, of which all outputs come again."""
        n = answers.call.n
        self.position = after or Position(answers.call.id, len(answers.prompts) * n)
        super().__init__(
            [
                [Choice(answers, at, each, self.position[at * n + each]) for each in range(n)]
                for at in range(len(answers.prompts))
            ]
        )
        self._answers = answers
        self._send = send
        self._choices = [choice for choices in self._writers for choice in choices]
        self._begun = any(choice.begun for choice in self._choices)

    def put(self, index: int, output: Output) -> None:
        choices = self._writers[index]
        if choices[0].waits_for_prompt:
            tokens = self._answers.scored_prompt(index, output)
            if tokens or isinstance(output, Completion):
                for choice in choices:
                    self.unsent -= choice.unsent
                    choice.score_prompt(tokens)
                    self._note(choice)
        super().put(index, output)

    async def send_next(self) -> None:
        choice = next(iter(self._due))
        if self._answers.call.chat:
            # Clients count on the roles of all choices, in order.
            for each in self._choices:
                if not each.begun:
                    await self._send_choice(each, each.role(), choice.version)
        # Only now: tokens that came while the roles were sent are taken along.
        del self._due[choice]
        version, unsent = choice.version, choice.unsent
        answer = choice.take()
        self.unsent -= unsent - choice.unsent
        if choice.due:
            self._due[choice] = None
        self._read.set()
        await self._send_choice(choice, answer, version)

    async def send_usage(self, completions: list[Completion], account: Account) -> None:
        """Send the last chunk, if the client requested it; `account`: as of `time_usage`."""
        options = self._answers.call.fields.stream_options
        if options.include_usage and not self.position.usage:
            self.position.usage = True
            usage = self._answers.usage(completions, self._reasoning_tokens(), account)
            chunk = self._answers.head(oldest_version(completions), chunk=True)
            await self._encode(chunk | {"choices": [], "usage": usage})

    async def _send_choice(self, choice: Choice, answer: Answer, version: int | None) -> None:
        call = self._answers.call
        chunk = self._answers.head(version, chunk=True) | {"choices": [answer]}
        if call.chat and call.token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._answers.prompts[0]
        if not self._begun:
            chunk |= self._answers.shown_prompt()
        self._begun = True
        options = call.fields.stream_options
        if options.include_usage:
            chunk["usage"] = None
        if options.continuous_usage_stats:
            prompt = sum(map(len, self._answers.prompts))
            made = sum(choice.received for choice in self._choices)
            chunk["usage"] = usage_of(prompt, made, reasoning_tokens=self._reasoning_tokens())
        self.position.move(choice.index, choice.sent)
        await self._encode(chunk)

    def _reasoning_tokens(self) -> int | None:
        if self._answers.call.reading is None:
            return None
        return sum(choice.reasoning_tokens for choice in self._choices)

    async def _encode(self, chunk: dict[str, Any]) -> None:
        await self._send(msgspec.json.encode(chunk), self.position.event_id)
