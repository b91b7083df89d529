"""Texts that follow a grammar, whatever the model makes of them."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
import torch

from nano_inference.config import BUNDLED_MODEL, Constraint, EngineConfig, SamplingParams
from nano_inference.stages.executor.constraints import Constraints
from nano_inference.stages.executor.sequences import SequenceTable
from nano_inference.stages.grammar import GrammarCompiler
from nano_inference.stages.tokenizer import load_tokenizer

from ..random_schemas import random_schema
from .plans import new_sequence

FOLDER = EngineConfig(model_path=BUNDLED_MODEL).model_folder
# More than the tokenizer has, as of models whose vocabulary is padded.
VOCAB = 800
MOST = 160
PROMPT = (5, 6, 7)


class Writer:
    """Writes texts by chance, within their grammars, as the executor would."""

    def __init__(self) -> None:
        self.compiler = GrammarCompiler(FOLDER, VOCAB)
        self.table = SequenceTable(8, 512, 16)
        self.constraints = Constraints(self.table, self.compiler)
        self.tokenizer = load_tokenizer(FOLDER)
        # What ends a part of a text, so that most come to their end.
        closing = {*self.tokenizer.convert_tokens_to_ids(list('"}],'))}
        self.bias = torch.zeros(VOCAB)
        self.bias[sorted(closing)] = 3.0
        self._next = 0

    def add(self, constraint: Constraint, generated: tuple[int, ...] = ()) -> int:
        """The row of a new sample, behind what it has."""
        self._next += 1
        sampling = SamplingParams(constraint=constraint, max_tokens=MOST)
        tokens = (*PROMPT, *generated)
        self.table.add(new_sequence(self._next, tokens, (), sampling, num_generated=len(generated)))
        return int(self.table.rows_of([self._next])[0])

    def step(self, rows: list[int], generator: torch.Generator) -> list[int]:
        """The next token of each."""
        chosen = np.array(rows)
        masks = self.constraints.begin(chosen)
        assert masks is not None
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 2 + self.bias
        masks.result(60).apply(logits)
        tokens = logits.argmax(-1).numpy()
        self.table.write_tokens(chosen, self.table.num_known[chosen], tokens)
        self.table.num_known[chosen] += 1
        self.table.num_generated[chosen] += 1
        return [int(token) for token in tokens]

    def write(self, constraint: Constraint, seed: int) -> tuple[str, bool]:
        """A text, and whether it came to its end."""
        row = self.add(constraint)
        generator = torch.Generator().manual_seed(seed)
        token_ids: list[int] = []
        while not self.table.at_limit(np.array([row]))[0]:
            (token,) = self.step([row], generator)
            if token in self.compiler.stop_ids:
                break
            token_ids.append(token)
        ended = token in self.compiler.stop_ids and not self.table.incomplete[row]
        self.table.remove(int(self.table.ids_of(np.array([row]))[0]))
        return self.tokenizer.decode(token_ids), ended


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


@pytest.mark.soak
def test_what_ends_is_what_its_schema_says(writer: Writer, soak: bool) -> None:
    ended = 0
    number = 2000 if soak else 150
    for seed in range(number):
        schema = random_schema(random.Random(seed))
        text, complete = writer.write(Constraint(json_schema=schema), seed)
        if complete:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended > number // 2


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (Constraint(choice=("yes", "no")), {"yes", "no"}),
        (Constraint(regex="a|b{2}"), {"a", "bb"}),
        (Constraint(gbnf='root ::= "x" | "y"'), {"x", "y"}),
        (Constraint(lark='start: "p" | "q" "r"'), {"p", "qr"}),
    ],
)
def test_every_text_that_may_be_and_no_other(
    writer: Writer, constraint: Constraint, texts: set[str]
) -> None:
    written = {writer.write(constraint, seed) for seed in range(30)}
    assert written == {(text, True) for text in texts}


def test_a_text_goes_on_behind_what_it_has(writer: Writer) -> None:
    """As after a preemption, or a failure of the lane."""
    constraint = Constraint(json_schema={"type": "array", "items": {"type": "integer"}})
    row = writer.add(constraint)
    tokens = [writer.step([row], torch.Generator().manual_seed(step))[0] for step in range(6)]
    resumed = writer.add(constraint, tuple(tokens[:4]))
    again = [writer.step([resumed], torch.Generator().manual_seed(step))[0] for step in (4, 5)]
    assert again == tokens[4:]


def test_a_row_is_another_sample_s_when_its_own_has_gone(writer: Writer) -> None:
    first = writer.add(Constraint(choice=("yes",)))
    writer.step([first], torch.Generator())
    writer.table.remove(int(writer.table.ids_of(np.array([first]))[0]))
    second = writer.add(Constraint(choice=("no",)))
    assert second == first
    (token,) = writer.step([second], torch.Generator())
    assert "no".startswith(writer.tokenizer.decode([token]))


def test_what_can_not_go_on_is_cut_off(writer: Writer) -> None:
    """Nothing follows that rule to its end, which shows only behind its first letter."""
    text, complete = writer.write(Constraint(lark='start: "a" x\nx: x'), 0)
    assert (text, complete) == ("a", False)


def test_rows_without_a_constraint_are_left_alone(writer: Writer) -> None:
    free, bound = writer.add(Constraint(regex="a")), writer.add(Constraint(regex="b"))
    writer.table.constrained[free] = False
    masks = writer.constraints.begin(np.array([free, bound]))
    assert masks is not None
    logits = torch.randn(2, VOCAB)
    masked = logits.clone()
    masks.result(60).apply(masked)
    assert torch.equal(masked[0], logits[0])
    assert masked[1].isfinite().sum() == 1
    assert writer.constraints.begin(np.array([free])) is None
