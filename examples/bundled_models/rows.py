"""The training data: how often each kind of example is drawn, and batches of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from . import tasks
from .evaluation import Kind, Model, evaluate, kinds_of
from .examples import Example, call_text, messages_of, tools_of
from .settings import TrainingSettings
from .tokenizer import END_OF_TEXT, SYSTEM_MESSAGES, TURN_END, FastTokenizer, chat_text, encode

NEVER = (0.0, 0.0, 0.0)
# Weights of each task by form (plain, chat, thinking) in the three stages: all tasks; chats with
# tools and thoughts; small talk added.
WEIGHTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "add1": ((10.0, 6.0, 2.0), (3.0, 3.0, 3.0), (3.0, 3.0, 2.0)),
    "sub1": ((10.0, 6.0, 2.0), (4.0, 3.0, 3.0), (4.0, 3.0, 2.0)),
    "add2": ((30.0, 12.0, 1.5), (10.0, 4.0, 3.0), (10.0, 4.0, 2.0)),
    "sub2": ((30.0, 12.0, 1.5), (10.0, 4.0, 3.0), (10.0, 4.0, 2.0)),
    "json": ((6.0, 5.0, 2.5), (3.0, 3.0, 2.5), (2.5, 2.5, 2.0)),
    "story": ((3.0, 3.0, 1.0), (1.5, 1.5, 2.0), (1.5, 1.5, 2.0)),
    "call": ((0.0, 3.0, 1.0), (0.0, 6.0, 2.5), (0.0, 6.0, 2.5)),
    "calls": ((0.0, 2.5, 1.0), (0.0, 4.0, 2.0), (0.0, 4.0, 2.0)),
    "result": ((0.0, 6.0, 1.5), (0.0, 14.0, 5.0), (0.0, 12.0, 4.5)),
    "no_call": ((0.0, 3.5, 1.5), (0.0, 5.0, 2.5), (0.0, 5.0, 2.5)),
    "greeting": (NEVER, NEVER, (0.0, 2.5, 1.0)),
    "thanks": (NEVER, NEVER, (0.0, 2.0, 0.7)),
    "about": (NEVER, NEVER, (0.0, 2.5, 1.0)),
    "unknown": (NEVER, NEVER, (0.0, 14.0, 4.0)),
    "unknown_to_tools": (NEVER, NEVER, (0.0, 3.0, 1.0)),
    "loose": (NEVER, NEVER, (0.0, 6.0, 1.5)),
    "loose2": (NEVER, NEVER, (0.0, 3.0, 0.5)),
}

TAPPED = ("add2", "sub2")
"""The tasks that must stay half learnt."""

TARGET = 0.52
"""Accuracy on the tune split from which on the weight of a tapped task is multiplied by CLOSED."""
CLOSED = 0.05

OPENING = 600
"""The step before which the taps stay closed. One-digit arithmetic comes first: the other digits of
a sum build on the same table of facts."""


class Taps:
    """The weights of all kinds of examples; a tapped kind is rare while its accuracy is high."""

    def __init__(self, settings: TrainingSettings) -> None:
        """Begin with the weights of the first stage, all taps closed."""
        self.stage = 0
        self.tight = False
        kinds = kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS)
        self.weights: dict[Kind, float] = {kind: self.weight(kind) for kind in kinds}
        # Thoughts do not teach two-digit results, so they have no tap.
        self.prompts: dict[Kind, list[Example]] = {
            (task, form): tasks.distinct(task, form, "tune", settings.tap_prompts, settings.seed)
            for task, form in kinds_of(*TAPPED)
            if form != "thinking"
        }
        for kind in self.prompts:
            self.set(kind, is_open=False)

    def weight(self, kind: Kind) -> float:
        """Return the weight of a kind in this stage with all taps open."""
        task, form = kind
        return WEIGHTS[task][self.stage][("plain", "chat", "thinking").index(form)]

    def set(self, kind: Kind, *, is_open: bool) -> None:
        """Open or close the tap of `kind`."""
        closed = 0.0 if self.tight else CLOSED
        self.weights[kind] = self.weight(kind) * (1.0 if is_open else closed)

    def measure(self, model: Model, tokenizer: FastTokenizer) -> dict[Kind, float]:
        """Return the accuracy of each tapped kind on the tune split."""
        return {
            kind: evaluate(model, tokenizer, prompts) / len(prompts)
            for kind, prompts in self.prompts.items()
        }

    def turn(self, model: Model, tokenizer: FastTokenizer, step: int) -> str:
        """Open or close the taps by their accuracies, and return a line for the log."""
        if step < OPENING:
            return "taps closed"
        states = []
        for kind, share in self.measure(model, tokenizer).items():
            is_open = share < TARGET
            self.set(kind, is_open=is_open)
            states.append(f"{' '.join(kind)} {share:.2f}{'+' if is_open else '-'}")
        return ", ".join(states)


EARLIER = (*tasks.TASKS, "greeting", "thanks", "about", "unknown")
"""The tasks of earlier turns of a chat. Small talk comes last and has weight 0 before its stage, so
earlier stages draw the same examples as without it."""


class Batch(NamedTuple):
    """The rows of one training step."""

    tokens: torch.Tensor
    positions: torch.Tensor  # Counted from the beginning of each document.
    # True where a token (third axis) sees another one (fourth axis); None: all before it.
    mask: torch.Tensor | None
    targets: torch.Tensor
    learn: torch.Tensor  # Nonzero where the target is a part of an answer.


Row = tuple[list[int], list[bool]]
"""The tokens of a row, and which of them to learn."""

DRAWN = 256
"""Rows drawn at a time for a model with a recurrent state."""


class Packer:
    """Packs examples into rows of training tokens, each token with whether to learn it."""

    def __init__(self, settings: TrainingSettings, tokenizer: FastTokenizer, taps: Taps) -> None:
        """Start the stream of documents of `settings.seed`."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.taps = taps
        self.rng = random.Random(settings.seed)
        self.waiting: list[list[Row]] = []
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
        tools = tools_of(examples[-1])
        messages: list[dict[str, Any]] = []
        text, ids, learn = "", list[int](), list[bool]()

        def add(piece: str, *, taught: bool) -> None:
            piece_ids = encode(self.tokenizer, piece)
            ids.extend(piece_ids)
            learn.extend([taught] * len(piece_ids))

        def add_answer(answer: str, untaught: tuple[int, int] = (0, 0), **form: bool) -> str:
            """Add the messages since the last answer, and the answer; return the whole text."""
            prompt = chat_text(self.tokenizer, messages, tools, **form)
            add(prompt[len(text) :], taught=False)
            start, end = untaught
            add(answer[:start], taught=True)
            add(answer[start:end], taught=False)
            add(answer[end:] + TURN_END, taught=True)
            messages.append({"role": "assistant", "content": answer})
            return prompt + answer + TURN_END

        if self.rng.random() < 0.2:
            messages.append({"role": "system", "content": self.rng.choice(SYSTEM_MESSAGES)})
        for example in examples:
            user, *after_calls = messages_of(example)
            messages.append(user)
            if example.calls:
                text = add_answer(call_text(example.calls))
                messages += after_calls[1:]  # Without the message of the calls.
            text = add_answer(example.answer, example.untaught, thinking=example.thinking)
        return ids, learn

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
        if self.settings.architecture == "hybrid":
            return self.separate()
        rows = torch.tensor([self.row() for _ in range(self.settings.rows)])
        tokens, learn, documents, positions = rows.unbind(-1)
        documents = documents[:, :-1]
        earlier = torch.ones(self.settings.length, self.settings.length, dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & earlier
        return Batch(tokens[:, :-1], positions[:, :-1], mask[:, None], tokens[:, 1:], learn[:, 1:])

    def separate(self) -> Batch:
        """Return a step of about as many tokens with a row for each document, padded at its end.

        No mask keeps documents in one row apart in a recurrent state. Some rows are long documents
        of several.
        """
        if not self.waiting:
            self.wait()
        rows = self.waiting.pop()
        longest = max(len(ids) for ids, _ in rows)
        pad = self.tokenizer.pad_token_id
        tokens = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
        learned = torch.tensor([learn + [False] * (longest - len(learn)) for _, learn in rows])
        positions = torch.arange(longest - 1).expand(len(rows), -1)
        return Batch(tokens[:, :-1], positions, None, tokens[:, 1:], learned[:, 1:])

    def wait(self) -> None:
        """Draw rows for some steps, and let those of about one length wait for a step together."""
        length = self.settings.length + 1
        rows: list[Row] = []
        for _ in range(DRAWN):
            ids, learn = self.document()
            while self.rng.random() < self.settings.joined and len(ids) < length:
                more, learn_more = self.document()
                ids, learn = ids + more, learn + learn_more
            rows.append((ids[:length], learn[:length]))
        rows.sort(key=lambda row: len(row[0]))
        step: list[Row] = []
        for row in rows:
            if step and (len(step) + 1) * len(row[0]) > self.settings.rows * length:
                self.waiting.append(step)
                step = []
            step.append(row)
        self.waiting.append(step)
        self.rng.shuffle(self.waiting)
