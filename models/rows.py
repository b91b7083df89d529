"""The tokens of training: examples as documents, documents as rows, rows as batches."""

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from . import tasks
from .evaluation import Kind
from .examples import Example, call_text, messages_of, tools_of
from .settings import Settings
from .taps import Taps
from .tokenizer import (
    END_OF_TEXT,
    SYSTEM_MESSAGES,
    TURN_END,
    FastTokenizer,
    chat_text,
    encode,
)

EARLIER = (*tasks.TASKS, "greeting", "thanks", "about", "unknown")
"""The tasks of earlier turns of a chat. Small talk comes last and has weight 0 before its stage, so
earlier stages draw the same examples as without it."""


class Batch(NamedTuple):
    """The rows of one training step."""

    tokens: torch.Tensor
    positions: torch.Tensor  # Counted from the beginning of each document.
    mask: torch.Tensor  # True where a token (third axis) sees another one (fourth axis).
    targets: torch.Tensor
    learn: torch.Tensor  # Nonzero where the target is a part of an answer.


class Chat:
    """The tokens of a chat that grows answer by answer."""

    def __init__(self, tokenizer: FastTokenizer, tools: list[dict[str, Any]] | None) -> None:
        """Begin an empty chat with these tools."""
        self.tokenizer = tokenizer
        self.tools = tools
        self.messages: list[dict[str, Any]] = []
        self.text = ""
        self.ids: list[int] = []
        self.learn: list[bool] = []

    def answer(
        self, answer: str, *, thinking: bool = False, untaught: tuple[int, int] = (0, 0)
    ) -> None:
        """Add the messages since the last answer, then the answer itself."""
        prompt = chat_text(self.tokenizer, self.messages, self.tools, thinking=thinking)
        self.add(prompt[len(self.text) :], learn=False)
        start, end = untaught
        self.add(answer[:start], learn=True)
        self.add(answer[start:end], learn=False)
        self.add(answer[end:] + TURN_END, learn=True)
        self.text = prompt + answer + TURN_END
        self.messages.append({"role": "assistant", "content": answer})

    def add(self, text: str, *, learn: bool) -> None:
        """Add tokens."""
        ids = encode(self.tokenizer, text)
        self.ids += ids
        self.learn += [learn] * len(ids)


class Packer:
    """Packs examples into rows of training tokens, each token with whether to learn it."""

    def __init__(self, settings: Settings, tokenizer: FastTokenizer, taps: Taps) -> None:
        """Start the stream of documents of `settings.seed`."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.taps = taps
        self.rng = random.Random(settings.seed)
        self.end_of_text = encode(tokenizer, END_OF_TEXT)

    def draw(self, kinds: Iterable[Kind] | None = None) -> Example:
        """Draw the next example of `kinds`, or of all kinds."""
        kinds = list(self.taps.weights if kinds is None else kinds)
        weights = [self.taps.weights[kind] for kind in kinds]
        task, form = self.rng.choices(kinds, weights)[0]
        return tasks.draw(task, form, "train", self.rng)

    def document(self) -> tuple[list[int], list[bool]]:
        """Return a completion or a chat of one or more turns, and which tokens to learn."""
        example = self.draw()
        if not example.chat:
            prompt = encode(self.tokenizer, example.prompt)
            answer = encode(self.tokenizer, example.answer) + self.end_of_text
            return prompt + answer, [False] * len(prompt) + [True] * len(answer)
        before: list[Example] = []
        while self.rng.random() < 0.2 and len(before) < 3:
            # With tools on offer, an unknown question has another answer.
            others = (task for task in EARLIER if not (example.tools and task == "unknown"))
            before.append(self.draw((task, "chat") for task in others))
        ids, learn = self.chat([*before, example])
        return ids + self.end_of_text, [*learn, False]

    def chat(self, examples: list[Example]) -> tuple[list[int], list[bool]]:
        """Return a chat of the examples in turn, with the tools of the last one from the start.

        Only the last one may have a thought, since the template leaves out earlier thoughts.
        """
        chat = Chat(self.tokenizer, tools_of(examples[-1]))
        if self.rng.random() < 0.2:
            content = self.rng.choice(SYSTEM_MESSAGES)
            chat.messages.append({"role": "system", "content": content})
        for example in examples:
            user, *after_calls = messages_of(example)
            chat.messages.append(user)
            if example.calls:
                chat.answer(call_text(example.calls))
                chat.messages += after_calls[1:]  # Without the message of the calls.
            chat.answer(example.answer, thinking=example.thinking, untaught=example.untaught)
        return chat.ids, chat.learn

    def row(self) -> list[tuple[int, bool, int, int]]:
        """Return a row of ``length`` + 1 tokens as (token, learn it, document, position).

        The last document may be cut; a document longer than a row is skipped. In some rows, all
        documents count as a single long one.
        """
        size = self.settings.length + 1
        joined = self.rng.random() < self.settings.joined
        row: list[tuple[int, bool, int, int]] = []
        number = 0
        while len(row) < size:
            start = 0 if joined else len(row)
            ids, learned = self.document()
            if len(ids) > size:
                continue
            for token, learn in zip(ids, learned, strict=True):
                row.append((token, learn, number, len(row) - start))
            number += not joined
        return row[:size]

    def batch(self) -> Batch:
        """Return the rows of one step."""
        rows = torch.tensor([self.row() for _ in range(self.settings.rows)])
        tokens, learn, documents, positions = rows.unbind(-1)
        documents = documents[:, :-1]
        earlier = torch.ones(self.settings.length, self.settings.length, dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & earlier
        return Batch(tokens[:, :-1], positions[:, :-1], mask[:, None], tokens[:, 1:], learn[:, 1:])
