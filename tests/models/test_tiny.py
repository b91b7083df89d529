"""What the bundled model has learnt, through Transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_inference.cli.chat import DEMO_QUESTIONS
from nano_inference.cli.demo import WEATHER
from nano_inference.models import talk, tasks
from nano_inference.models.evaluation import evaluate
from nano_inference.models.examples import messages_of, tools_of
from nano_inference.models.tokenizer import chat_text


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


# So many prompts, and how many of them have to be right; on all held-out prompts the shares are in
# the model's card.
@pytest.mark.parametrize(
    ("task", "form", "count", "least"),
    [
        ("add1", "plain", 10, 9),
        ("json", "chat", 10, 9),
        ("story", "plain", 6, 5),
        ("add1", "thinking", 20, 18),
        ("sub1", "thinking", 20, 17),
        ("json", "thinking", 10, 9),
        ("call", "chat", 20, 17),
        ("call", "thinking", 10, 8),
        ("calls", "chat", 12, 9),
        ("result", "chat", 20, 16),
        ("no_call", "chat", 20, 12),
        ("greeting", "chat", 10, 8),
        ("thanks", "chat", 10, 8),
        ("about", "chat", 10, 8),
        ("unknown", "chat", 20, 17),
        ("unknown_to_tools", "chat", 10, 8),
    ],
)
def test_held_out_prompts(
    task: str, form: tasks.Form, count: int, least: int, model: Any, tokenizer: Any
) -> None:
    examples = tasks.distinct(task, form, "heldout", count, seed=1)
    assert evaluate(model, tokenizer, examples) >= least * len(examples) / count


@pytest.mark.parametrize("task", ["add2", "sub2"])
def test_two_digits_are_half_learnt(task: str, model: Any, tokenizer: Any) -> None:
    right = evaluate(model, tokenizer, tasks.distinct(task, "plain", "heldout", 100, seed=1))
    assert 40 <= right <= 80


def answer_of(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=100)
    return str(tokenizer.decode(output[0, ids.shape[1] :]))


def said_to(model: Any, tokenizer: Any, text: str) -> str:
    prompt = chat_text(tokenizer, [{"role": "user", "content": text}])
    return answer_of(model, tokenizer, prompt).removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("hello", talk.GREETING),
        ("Hi there!", talk.GREETING),
        ("Good morning!", talk.GREETING),
        ("thanks", talk.THANKS),
        ("bye", talk.GOODBYE),
        ("Who are you?", talk.ABOUT),
        ("What can you do?", talk.HELP),
        ("What is the capital of France?", talk.UNKNOWN),
        ("How many legs does a spider have?", talk.UNKNOWN),
        ("tell me a joke", talk.UNKNOWN),
        ("tell me a story", talk.UNKNOWN_STORY),
    ],
)
def test_small_talk_has_an_answer(text: str, answer: str, model: Any, tokenizer: Any) -> None:
    assert said_to(model, tokenizer, text) == answer


def test_the_questions_that_chat_opens_with_are_answered(model: Any, tokenizer: Any) -> None:
    assert [said_to(model, tokenizer, question) for question in DEMO_QUESTIONS] == [
        "7",
        '{"name": "Ana", "age": 30, "job": "baker"}',
        tasks.tell_story("Ana", "cat", "red", "ball"),
    ]
    tried = (talk.HELP, talk.UNKNOWN, talk.UNKNOWN_STORY, talk.UNKNOWN_JSON)
    assert all(any(question in answer for question in DEMO_QUESTIONS) for answer in tried)


@pytest.mark.parametrize("expression", tasks.QUOTED)
def test_quoted_sums_are_right(expression: str, model: Any, tokenizer: Any) -> None:
    total = str(sum(map(int, expression.split(" + "))))
    assert answer_of(model, tokenizer, f"{expression} =") == f" {total}<|endoftext|>"
    assert said_to(model, tokenizer, f"What is {expression}?") == total


def test_a_whole_conversation_with_tools(model: Any, tokenizer: Any) -> None:
    """From the question over two calls to the sentence, each answer parsed and put in again."""
    question = {"role": "user", "content": "What is the weather in Oslo and Lima?"}
    tools, messages = [WEATHER], list[dict[str, Any]]([question])
    for thinking in (True, False):
        prompt = chat_text(tokenizer, messages, tools, thinking=thinking)
        message = tokenizer.parse_response(
            answer_of(model, tokenizer, prompt), prefix=prompt, tools=tools
        )
        assert ("reasoning_content" in message) == thinking
        messages.append(message)
        if thinking:
            made = [call["function"] for call in message["tool_calls"]]
            assert made == [
                {"name": "get_weather", "arguments": {"city": city}} for city in ("Oslo", "Lima")
            ]
            for sky in ("sunny", "rainy"):
                brought = {"temperature": 21, "condition": sky}
                messages.append({"role": "tool", "content": json.dumps(brought)})
    assert messages[-1]["content"] == (
        "It is sunny in Oslo, 21 degrees. It is rainy in Lima, 21 degrees."
    )


def test_held_out_answers_parse_into_calls(model: Any, tokenizer: Any) -> None:
    """The template's calls are the ones that the model was taught to write."""
    parsed = 0
    for example in tasks.distinct("call", "chat", "heldout", 8, seed=2):
        prompt = chat_text(tokenizer, messages_of(example), tools_of(example))
        wanted = tokenizer.parse_response(example.answer, prefix=prompt)
        answer = answer_of(model, tokenizer, prompt)
        parsed += tokenizer.parse_response(answer, prefix=prompt) == wanted
    assert parsed >= 6
