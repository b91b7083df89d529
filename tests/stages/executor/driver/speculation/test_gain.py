"""What speculation is worth, in a world of made-up times and texts: no step is timed here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from nano_inference.stages.executor.driver.speculation.control import CostControl
from nano_inference.stages.executor.driver.speculation.costs import StepCosts
from nano_inference.stages.executor.driver.speculation.drafts import NO_DRAFT, Draft

COSTS = StepCosts((1, 2, 4, 8, 16, 32, 64), (0.036, 0.041, 0.042, 0.051, 0.069, 0.115, 0.2))
"""Of a model of 0.5 billion parameters on two CPU cores."""

DRAFTING_S = 20e-6
"""What asking for a row's draft and learning from it takes."""

LONGEST = 16

Rights = Iterator[bool]
"""Whether the source knows each next token of a text; by itself, whatever it said before."""


def always() -> Rights:
    while True:
        yield True


def never() -> Rights:
    while True:
        yield False


def templates(known: int, unknown: int, seed: int = 1) -> Rights:
    """Stretches that are known, and others that are not, as of values in a template."""
    lengths = random.Random(seed)
    while True:
        yield from (True for _ in range(lengths.randint(1, 2 * known)))
        yield from (False for _ in range(lengths.randint(1, 2 * unknown)))


def luck(share: float, seed: int = 1) -> Rights:
    """Each token by itself, in so many cases."""
    chance = random.Random(seed)
    while True:
        yield chance.random() < share


class Text:
    """One row. Its tokens are their positions; a source that does not know one says -1."""

    def __init__(self, rights: Rights) -> None:
        self._rights = rights
        self._ahead: list[bool] = []
        self.position = 0

    def draft(self) -> Draft:
        while len(self._ahead) < LONGEST + 1:
            self._ahead.append(next(self._rights))
        tokens = (
            self.position + place if right else -1
            for place, right in enumerate(self._ahead[:LONGEST])
        )
        return Draft(tuple(tokens), (), "made up")

    def advance(self, verified: int) -> list[int]:
        """The tokens of a step that verifies so many places of the draft."""
        accepted = next(
            (n for n, right in enumerate(self._ahead[:verified]) if not right), verified
        )
        got = list(range(self.position, self.position + accepted + 1))
        self.position += len(got)
        del self._ahead[: len(got)]
        return got


def run(texts: list[Text], num_tokens: int, control: CostControl) -> float:
    """Times the tokens per second of off, for so many tokens of all texts together."""
    seconds, tokens = 0.0, 0
    while tokens < num_tokens:
        drafts = [text.draft() for text in texts]
        control.begin(len(texts), 0, 64)
        chances = [control.expected(row, draft) for row, draft in enumerate(drafts)]
        lengths = control.lengths(chances)
        seconds += COSTS.of(len(texts) + sum(lengths)) + DRAFTING_S * len(texts)
        for row, (text, draft, length) in enumerate(zip(texts, drafts, lengths, strict=True)):
            got = text.advance(length)
            control.settle(row, draft, got)
            tokens += len(got)
    return tokens / seconds / (len(texts) / COSTS.of(len(texts)))


def started(rows: int) -> CostControl:
    control = CostControl(COSTS)
    for row in range(rows):
        control.add(row)
    return control


Texts = Callable[[int], Rights]


@pytest.mark.parametrize("num_tokens", [64, 512])
@pytest.mark.parametrize(
    ("rows", "text", "least"),
    [
        (1, lambda seed: always(), 3.0),
        (4, lambda seed: always(), 2.0),
        (16, lambda seed: always(), 1.25),
        (1, lambda seed: templates(30, 5, seed), 2.0),
        (16, lambda seed: templates(30, 5, seed), 1.1),
    ],
)
def test_a_text_that_the_source_knows_is_made_faster(
    rows: int, text: Texts, least: float, num_tokens: int
) -> None:
    texts = [Text(text(seed)) for seed in range(rows)]
    assert run(texts, num_tokens * rows, started(rows)) >= least


@pytest.mark.parametrize("num_tokens", [64, 512])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(
    "text",
    [
        lambda seed: never(),
        lambda seed: luck(0.05, seed),
        lambda seed: luck(0.2, seed),
        lambda seed: luck(0.5, seed),
        lambda seed: templates(3, 30, seed),
        lambda seed: templates(10, 10, seed),
    ],
)
def test_no_text_is_made_slower(rows: int, text: Texts, num_tokens: int) -> None:
    """On average: a source that has luck at first is believed for a while."""
    gains = []
    for number in range(5):
        texts = [Text(text(rows * number + seed)) for seed in range(rows)]
        gains.append(run(texts, num_tokens * rows, started(rows)))
    assert sum(gains) / len(gains) >= 0.98


@pytest.mark.parametrize("rows", [1, 16])
def test_a_text_that_changes_is_followed(rows: int) -> None:
    def changing() -> Rights:
        while True:
            yield from (False for _ in range(300))
            yield from (True for _ in range(300))

    texts, control = [Text(changing()) for _ in range(rows)], started(rows)
    gains = [run(texts, 300 * rows, control) for _ in range(6)]
    known = 3.0 if rows == 1 else 1.2
    # A step or two too late each time, in which a part of the next stretch is run already.
    assert all(gain >= known for gain in gains[1::2])
    assert all(gain >= 0.98 for gain in gains[0::2])


def test_a_batch_of_one_known_text_among_others_is_not_made_slower() -> None:
    texts = [Text(always()), *(Text(never()) for _ in range(15))]
    assert run(texts, 16 * 512, started(16)) >= 0.98


def test_what_one_sequence_showed_helps_the_next() -> None:
    """A source that was always wrong is asked to show something before rows are spent on it."""
    control = started(2)
    run([Text(never())], 64, control)
    draft = Draft(tuple(range(LONGEST)), (), "made up")
    control.add(1)
    control.begin(1, 0, 64)
    assert control.lengths([control.expected(1, draft)]) == [0]
    control.settle(1, NO_DRAFT, [5])
    for _ in range(20):
        control.settle(1, draft, [0])
    control.begin(1, 0, 64)
    assert control.lengths([control.expected(1, draft)])[0] > 0
