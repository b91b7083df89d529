"""Texts that follow a grammar, whatever the model makes of them."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
import torch

from nano_inference.config import Constraint
from nano_inference.stages.executor.driver import grammar_masks
from nano_inference.stages.executor.driver.sequences import Places

from ....text.random_schemas import random_schema
from ..plans import INFO
from .writer import MOST, VOCAB, Writer


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


@pytest.mark.soak
def test_finished_texts_match_their_schema(writer: Writer, soak: bool) -> None:
    ended = 0
    number = 2000 if soak else 80
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
def test_masks_allow_exactly_the_texts_of_the_grammar(
    writer: Writer, constraint: Constraint, texts: set[str]
) -> None:
    written = {writer.write(constraint, seed) for seed in range(30)}
    assert written == {(text, True) for text in texts}


OTHER = "e\u0301x Cafe\u0301 \u212b"
FORCED: list[tuple[Constraint, str]] = [
    (Constraint(choice=(OTHER,)), OTHER),
    (Constraint(regex=OTHER), OTHER),
    (Constraint(json_schema={"const": OTHER}), f'"{OTHER}"'),
    (Constraint(regex="<think>a</think>b"), "<think>a</think>b"),
    (Constraint(choice=("a<think>b<tool_call>",)), "a<think>b<tool_call>"),
    (Constraint(json_schema={"const": "<|im_end|><think>"}), '"<|im_end|><think>"'),
    (Constraint(gbnf=r'root ::= "<think>" "<|im_start|>" [a]'), "<think><|im_start|>a"),
    (Constraint(lark='start: "<think>" /a<\\/think>/'), "<think>a</think>"),
]


@pytest.mark.parametrize(("constraint", "text"), FORCED)
def test_forced_text_comes_as_it_is_written(
    writer: Writer, constraint: Constraint, text: str
) -> None:
    """Also where it isn't normalised, or spells an added token."""
    for seed in range(4):
        assert writer.write(constraint, seed) == (text, True)


def test_a_shown_token_may_stand_for_its_name(writer: Writer) -> None:
    """A constraint may contain the token's name; the names of hidden tokens are spelled by other
    tokens.
    """
    names = ["<think>", "</think>", "<|im_end|>"]
    opened, closed, hidden = writer.tokenizer.convert_tokens_to_ids(names)
    a, less, b = writer.tokenizer.convert_tokens_to_ids(["a", "<", "b"])
    constraint = Constraint(regex=r"<think>a{1,3}<\/think>(b|<\|im_end\|>)")
    assert opened in writer.allowed(constraint)[0]
    assert closed not in writer.allowed(constraint)[0]
    assert {a, less, closed} & writer.allowed(constraint, (opened, a))[0] == {a, less, closed}
    assert opened not in writer.allowed(constraint, (opened, a))[0]
    # Spelled in full, or by its token, the same follows.
    spelled = tuple(writer.tokenizer.convert_tokens_to_ids(list("</think>")))
    for tokens in ((closed,), spelled):
        (found,) = writer.allowed(constraint, (opened, a, *tokens))
        assert {b, less} <= found
        assert hidden not in found
    # Drafted tokens change nothing.
    drafted = writer.allowed(constraint, (opened,), (a, a, a))
    assert drafted == [writer.allowed(constraint, (opened, *[a] * n))[0] for n in range(4)]
    assert [closed in each for each in drafted] == [False, True, True, True]
    # A constraint that doesn't have the name, or tells the token from it, or counts tokens.
    for other in (
        Constraint(regex="[^b]{3,9}b"),
        Constraint(lark="start: /[^b]{3,9}/ <think>"),
        Constraint(lark="start: T\nT: /[^b]{9,20}/ & ~/.*<\\/think>.*/ & ~/.*<think>.*/"),
        Constraint(lark='start: x\nx[max_tokens=3]: /[^b]{9,20}/ "<think>"'),
    ):
        writer.compiler.check(other)
        (found,) = writer.allowed(other)
        assert a in found
        assert not {opened, closed} & found


def test_matchers_continue_after_the_present_tokens(writer: Writer) -> None:
    """A preemption, or a failure of the lane, came before."""
    constraint = Constraint(json_schema={"type": "array", "items": {"type": "integer"}})
    row = writer.add(constraint)
    tokens = [writer.step([row], torch.Generator().manual_seed(step))[0] for step in range(6)]
    resumed = writer.add(constraint, tuple(tokens[:4]))
    again = [writer.step([resumed], torch.Generator().manual_seed(step))[0] for step in (4, 5)]
    assert again == tokens[4:]


def test_dead_ends_of_a_grammar_end_the_sample(writer: Writer) -> None:
    """Nothing follows that rule to its end, which shows only after its first letter."""
    text, complete = writer.write(Constraint(lark='start: "a" x\nx: x'), 0)
    assert (text, complete) == ("a", False)


def test_grammars_that_grow_too_large_end_their_request(writer: Writer) -> None:
    """llguidance's bounds hold for each mask; a sample beside it goes on."""
    bomb = writer.add(Constraint(regex="(((a{1,100}){1,100}){1,100}){1,100}"))
    other = writer.add(Constraint(regex=f"a{{{MOST}}}"))
    (a,) = writer.tokenizer.encode("a", add_special_tokens=False)
    generator = torch.Generator().manual_seed(0)
    while not writer.table.incomplete[bomb]:
        assert writer.table.num_generated[other] < MOST - 8, "the bounds were never met"
        writer.step([bomb, other], generator)
        for row in (bomb, other):
            # As long a way as there is.
            if not writer.table.incomplete[row]:
                writer.table.tokens[row, writer.table.num_known[row] - 1] = a
    assert writer.table.at_limit(np.array([bomb]))[0]
    assert not writer.table.incomplete[other]
    assert not writer.table.at_limit(np.array([other]))[0]
    (failure,) = writer.constraints.take_failures()
    assert (failure.status, failure.code) == ("error", "invalid_constraint")
    assert failure.request_id == INFO.request_id
    assert not writer.constraints.take_failures()


def test_matchers_of_sequences_that_have_left_are_freed(writer: Writer) -> None:
    gone, stays = writer.add(Constraint(regex="a*")), writer.add(Constraint(regex="b*"))
    generator = torch.Generator().manual_seed(0)
    writer.step([gone, stays], generator)
    writer.table.remove(int(writer.table.ids_of(np.array([gone]))[0]))
    writer.step([stays], generator)
    assert gone not in writer.constraints.samples
    assert stays in writer.constraints.samples


def test_repeatedly_slow_masks_end_their_request(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_masks, "_SLOW_S", 0.0)
    monkeypatch.setattr(grammar_masks, "_MASK_S", 0.0)
    row = writer.add(Constraint(regex="a*"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        writer.step([row], generator)
    assert not writer.constraints.take_failures()
    monkeypatch.setattr(grammar_masks, "_EXCESS_S", 0.0)
    writer.step([row], generator)
    (failure,) = writer.constraints.take_failures()
    assert failure.code == "invalid_constraint"
    assert writer.table.at_limit(np.array([row]))[0]


def test_rows_without_a_constraint_are_unchanged(writer: Writer) -> None:
    free, bound = writer.add(Constraint(regex="a")), writer.add(Constraint(regex="b"))
    writer.table.constrained[free] = False
    masks = writer.constraints.begin(Places.next_of(np.array([free, bound])))
    assert masks is not None
    logits = torch.randn(2, VOCAB)
    masked = logits.clone()
    masks.result(60).apply(masked)
    assert torch.equal(masked[0], logits[0])
    assert masked[1].isfinite().sum() == 1
    assert writer.constraints.begin(Places.next_of(np.array([free]))) is None
