"""The text that the bundled model is trained on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from bundled_models import tasks
from bundled_models.evaluation import kinds_of
from bundled_models.examples import call_text, messages_of, tools_of
from bundled_models.rows import Packer, Taps
from bundled_models.settings import TrainingSettings
from bundled_models.tokenizer import TURN_END, encode, prompt_text

KINDS = kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS)


def drawn(task: str, form: tasks.Form, count: int, split: tasks.Split) -> Iterator[tasks.Example]:
    rng = random.Random(f"{task} {form}")
    for _ in range(count):
        yield tasks.draw(task, form, split, rng)


@pytest.mark.parametrize(("task", "form"), KINDS)
def test_prompt_and_answer_tokenise_as_one_text(
    task: str, form: tasks.Form, tokenizer: Any
) -> None:
    for example in drawn(task, form, 60, "train"):
        prompt = prompt_text(tokenizer, example)
        prompt_ids, answer_ids = encode(tokenizer, prompt), encode(tokenizer, example.answer)
        # Training and inference tokenise the two apart.
        assert prompt_ids + answer_ids == encode(tokenizer, prompt + example.answer)
        assert tokenizer.decode(prompt_ids + answer_ids) == prompt + example.answer
        assert example.thinking == (form == "thinking") == prompt.endswith("<think>\n")
        assert tasks.grade(example, f"{example.answer}\n")
        assert not tasks.grade(example, f"{example.answer}!")


@pytest.mark.parametrize("task", ["add2", "sub2"])
def test_thoughts_do_not_teach_two_digit_results(task: str) -> None:
    for example in drawn(task, "thinking", 200, "train"):
        thought, _, answer = example.answer.partition("\n</think>\n\n")
        start, end = example.untaught
        assert thought[start:end] == f" {answer}"
        assert answer not in thought[end:]
    assert all(e.untaught == (0, 0) for e in drawn(task.replace("2", "1"), "thinking", 50, "train"))


def test_held_out_questions_stand_in_no_training_example() -> None:
    kinds = [kind for kind in KINDS if kind[0] in tasks.TOOL_TASKS]
    taught = {e.prompt for kind in kinds for e in drawn(*kind, 1500, "train")}
    held_out = {e.prompt for kind in kinds for e in drawn(*kind, 60, "heldout")}
    assert len(held_out) > 100
    assert not taught & held_out


@pytest.mark.parametrize("task", ["call", "calls", "result"])
def test_calls_name_an_offered_tool_and_its_parameters(task: str) -> None:
    for example in drawn(task, "chat", 200, "train"):
        functions = {f["function"]["name"]: f["function"] for f in tools_of(example) or []}
        assert len(functions) == len(example.tools) <= 3
        text = call_text(example.calls) if task == "result" else example.answer
        calls = [json.loads(part) for part in text.splitlines() if not part.startswith("<")]
        assert len(calls) == 2 if task == "calls" else len(calls) in (1, 2)
        for call in calls:
            properties = functions[call["name"]]["parameters"]["properties"]
            assert list(call["arguments"]) == list(properties)
            for argument in call["arguments"].values():
                assert str(argument) in example.prompt


def test_held_out_talk_is_new() -> None:
    """Openings alone are all taught; what has an ending, a new wording or a new subject is not."""
    kinds = [(task, "chat") for task in ("greeting", "thanks", "about", "unknown")]
    taught = {e.prompt.lower() for kind in kinds for e in drawn(*kind, 1500, "train")}
    held_out = {e.prompt.lower() for kind in kinds for e in drawn(*kind, 60, "heldout")}
    assert len(held_out) > 100
    assert not taught & held_out


def packer(tokenizer: Any) -> Packer:
    settings = TrainingSettings(tap_prompts=1)
    packer = Packer(settings, tokenizer, Taps(settings))
    packer.rng = random.Random(2)  # Draws no system message first.
    return packer


def test_only_the_assistant_s_tokens_are_learnt(tokenizer: Any) -> None:
    example = next(e for e in drawn("result", "thinking", 50, "train") if len(e.calls) == 2)
    (first,) = drawn("add1", "chat", 1, "train")
    ids, learn = packer(tokenizer).chat([first, example])
    written = (first.answer, call_text(example.calls), example.answer)
    learnt = [token for token, taught in zip(ids, learn, strict=True) if taught]
    assert tokenizer.decode(learnt) == "".join(part + TURN_END for part in written)
    # The calls in the text are those that the template makes of messages.
    rendered = tokenizer.apply_chat_template(
        [
            *messages_of(first),
            {"role": "assistant", "content": first.answer},
            *messages_of(example),
        ],
        tools=tools_of(example),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert tokenizer.decode(ids) == rendered + example.answer + TURN_END
