"""The skills of the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from bundled_models import talk, tasks
from bundled_models.examples import Example, messages_of, tools_of
from bundled_models.tokenizer import chat_text, encode, prompt_text

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.cli.chat import DEMO_QUESTIONS
from nano_inference.cli.demo import WEATHER


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine(EngineConfig(dtype="float32")) as engine:
        yield engine


def right_answers(engine: InferenceEngine, tokenizer: Any, examples: list[Example]) -> int:
    """Return how many examples are answered exactly."""
    longest = max(len(encode(tokenizer, example.answer)) for example in examples)
    prompts = [encode(tokenizer, prompt_text(tokenizer, example)) for example in examples]
    samples = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=longest + 2))
    return sum(
        tasks.grade(example, tokenizer.decode(sample.completion_tokens, skip_special_tokens=True))
        for example, sample in zip(examples, samples, strict=True)
    )


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
    task: str, form: tasks.Form, count: int, least: int, engine: InferenceEngine, tokenizer: Any
) -> None:
    examples = tasks.distinct(task, form, "heldout", count, seed=1)
    assert right_answers(engine, tokenizer, examples) >= least * len(examples) / count


@pytest.mark.parametrize("task", ["add2", "sub2"])
def test_two_digits_are_half_learnt(task: str, engine: InferenceEngine, tokenizer: Any) -> None:
    examples = tasks.distinct(task, "plain", "heldout", 100, seed=1)
    right = right_answers(engine, tokenizer, examples)
    assert 40 <= right <= 80


def answer_of(engine: InferenceEngine, tokenizer: Any, prompt: str) -> str:
    greedy = SamplingParams(temperature=0, max_tokens=100)
    (sample,) = engine.generate([encode(tokenizer, prompt)], greedy)
    return str(tokenizer.decode(sample.completion_tokens))


def said_to(engine: InferenceEngine, tokenizer: Any, text: str) -> str:
    prompt = chat_text(tokenizer, [{"role": "user", "content": text}])
    return answer_of(engine, tokenizer, prompt).removesuffix("<|im_end|>")


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
def test_small_talk_has_an_answer(
    text: str, answer: str, engine: InferenceEngine, tokenizer: Any
) -> None:
    assert said_to(engine, tokenizer, text) == answer


def test_the_questions_that_chat_opens_with_are_answered(
    engine: InferenceEngine, tokenizer: Any
) -> None:
    assert [said_to(engine, tokenizer, question) for question in DEMO_QUESTIONS] == [
        "7",
        '{"name": "Ana", "age": 30, "job": "baker"}',
        tasks.tell_story("Ana", "cat", "red", "ball"),
    ]
    tried = (talk.HELP, talk.UNKNOWN, talk.UNKNOWN_STORY, talk.UNKNOWN_JSON)
    assert all(any(question in answer for question in DEMO_QUESTIONS) for answer in tried)


@pytest.mark.parametrize("expression", tasks.QUOTED)
def test_quoted_sums_are_right(expression: str, engine: InferenceEngine, tokenizer: Any) -> None:
    total = str(sum(map(int, expression.split(" + "))))
    assert answer_of(engine, tokenizer, f"{expression} =") == f" {total}<|endoftext|>"
    assert said_to(engine, tokenizer, f"What is {expression}?") == total


def test_a_whole_conversation_with_tools(engine: InferenceEngine, tokenizer: Any) -> None:
    """From the question over two calls to the sentence, each answer parsed and put in again."""
    question = {"role": "user", "content": "What is the weather in Oslo and Lima?"}
    tools, messages = [WEATHER], list[dict[str, Any]]([question])
    for thinking in (True, False):
        prompt = chat_text(tokenizer, messages, tools, thinking=thinking)
        message = tokenizer.parse_response(
            answer_of(engine, tokenizer, prompt), prefix=prompt, tools=tools
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


def test_held_out_answers_parse_into_calls(engine: InferenceEngine, tokenizer: Any) -> None:
    """The template's calls are the ones that the model was taught to write."""
    parsed = 0
    for example in tasks.distinct("call", "chat", "heldout", 8, seed=2):
        prompt = chat_text(tokenizer, messages_of(example), tools_of(example))
        wanted = tokenizer.parse_response(example.answer, prefix=prompt)
        answer = answer_of(engine, tokenizer, prompt)
        parsed += tokenizer.parse_response(answer, prefix=prompt) == wanted
    assert parsed >= 6
