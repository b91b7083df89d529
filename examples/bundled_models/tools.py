"""Chats with tools: questions that a tool answers, the calls, and sentences about the results.

Names, descriptions and parameters of a tool vary, so a call depends on the tools in the system
turn. Places and people vary too: some are made up of syllables.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from .examples import CITIES, NAMES, WORDS, Example, Form, call_text, make_example


class ToolKind(NamedTuple):
    """The purpose of a tool, in all its wordings."""

    names: list[str]
    descriptions: list[str]
    parameters: list[list[tuple[str, str]]]
    type: str
    questions: list[str]
    of_two: list[str]


KINDS = {name: ToolKind(**texts) for name, texts in WORDS["tools"].items()}
SKIES = WORDS["skies"]
SYLLABLES = WORDS["syllables"]

NO_TOOL = "I have no tool for that."
"""The answer to a question for which a tool is missing."""

Arguments = tuple[str | int, ...]
"""The arguments of one call."""


class Question(NamedTuple):
    """A question with the tools on offer, and the calls that answer it."""

    kind: str
    text: str
    tool: str
    tools: tuple[str, ...]
    arguments: tuple[Arguments, ...]
    calls: tuple[str, ...]


def _tool(kind: str, rng: random.Random) -> tuple[str, tuple[str, ...], str]:
    """Draw the wording of a tool; return its name, its parameters and its function as JSON."""
    texts = KINDS[kind]
    name = rng.choice(texts.names)
    parameters = rng.choice(texts.parameters)
    described, titled = rng.random() < 0.1, rng.random() < 0.1
    properties = {
        parameter: ({"title": parameter.capitalize()} if titled else {})
        | {"type": texts.type}
        | ({"description": text} if described else {})
        for parameter, text in parameters
    }
    schema: dict[str, object] = {"type": "object", "properties": properties}
    names = tuple(parameter for parameter, _ in parameters)
    if rng.random() < 0.9:
        schema["required"] = list(names)
    if rng.random() < 0.1:
        schema["additionalProperties"] = False
    if titled:  # As pydantic writes it.
        schema = {"properties": schema.pop("properties")} | schema
    function: dict[str, object] = {"name": name}
    if rng.random() < 0.85:
        function["description"] = rng.choice(texts.descriptions)
    function["parameters"] = schema
    return name, names, json.dumps(function)


def some_tools(rng: random.Random, without: str = "") -> tuple[str, ...]:
    """Draw one to three tools, none of them of the kind `without`."""
    kinds = [kind for kind in KINDS if kind != without]
    chosen = rng.sample(kinds, rng.choices((1, 2, 3), (5, 3, 2))[0])
    return tuple(_tool(kind, rng)[2] for kind in chosen)


def _arguments(kind: str, rng: random.Random) -> Arguments:
    """Draw the arguments of one call."""
    if kind == "multiply":
        return rng.randrange(2, 100), rng.randrange(2, 100)
    if rng.random() < 0.35:
        word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()
        return (f"{rng.choice(('San', 'New', 'Port'))} {word}" if rng.random() < 0.2 else word,)
    return (rng.choice(NAMES if kind == "age" else CITIES),)


def _question(rng: random.Random, *, two: bool) -> Question:
    """Draw a question about one thing or two, with a tool that answers it and others."""
    kind = rng.choice([kind for kind, texts in KINDS.items() if texts.of_two or not two])
    arguments: tuple[Arguments, ...] = (_arguments(kind, rng),)
    while two and len(arguments) < 2:
        other = _arguments(kind, rng)
        arguments += (other,) if other not in arguments else ()
    wording = rng.choice(KINDS[kind].of_two if two else KINDS[kind].questions)
    name, parameters, tool = _tool(kind, rng)
    tools = [tool]
    if rng.random() < 0.5:
        tools += some_tools(rng, without=kind)[:2]
        rng.shuffle(tools)
    calls = tuple(
        json.dumps(
            {"name": name, "arguments": dict(zip(parameters, values, strict=True))},
            ensure_ascii=False,
        )
        for values in arguments
    )
    text = wording.format(*(value for values in arguments for value in values))
    return Question(kind, text, name, tuple(tools), arguments, calls)


def call(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question that one call answers, or two calls where the task is `calls`."""
    two = task == "calls"
    question = _question(rng, two=two)
    thought = f"Use {question.tool}{' twice' if two else ''}."
    answer = call_text(question.calls)
    return question.text, make_example(task, form, question.text, answer, thought, question.tools)


def result(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question with its calls and their results; the answer is a sentence for each."""
    question = _question(rng, two=rng.random() < 0.35)
    results = [_RESULTS[question.kind](values, rng) for values in question.arguments]
    answer = " ".join(sentence for _, sentence in results)
    thought = f"{question.tool} has answered."
    example = make_example(task, form, question.text, answer, thought, question.tools)
    texts = tuple(text for text, _ in results)
    return question.text, replace(example, calls=question.calls, results=texts)


def unanswerable(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question for which there is no tool, though there may be others."""
    question = _question(rng, two=rng.random() < 0.2)
    tools = some_tools(rng, without=question.kind) if rng.random() < 0.7 else ()
    example = make_example(task, form, question.text, NO_TOOL, "No tool fits.", tools)
    return question.text, example


def _result_text(values: dict[str, str | int], plain: str, rng: random.Random) -> str:
    """Return a result as a tool gives it: as JSON, or as text."""
    if rng.random() < 0.5:
        return plain
    return json.dumps(dict(rng.sample(list(values.items()), len(values))), ensure_ascii=False)


def _weather(asked: Arguments, rng: random.Random) -> tuple[str, str]:
    sky, degrees = rng.choice(SKIES), rng.randrange(-15, 40)
    chance = rng.random()
    if chance < 0.25:
        text = _result_text({rng.choice(("weather", "condition")): sky}, sky, rng)
        return text, f"It is {sky} in {asked[0]}."
    if chance < 0.4:
        text = _result_text({"temperature": degrees}, f"{degrees} degrees", rng)
        return text, f"It is {degrees} degrees in {asked[0]}."
    values: dict[str, str | int] = {
        rng.choice(("temperature", "degrees")): degrees,
        rng.choice(("weather", "condition")): sky,
    }
    plain = rng.choice(("{0}, {1} degrees", "{1} degrees, {0}", "{0} and {1} degrees"))
    text = _result_text(values, plain.format(sky, degrees), rng)
    return text, f"It is {sky} in {asked[0]}, {degrees} degrees."


def _time(asked: Arguments, rng: random.Random) -> tuple[str, str]:
    time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return _result_text({"time": time}, time, rng), f"It is {time} in {asked[0]}."


def _age(asked: Arguments, rng: random.Random) -> tuple[str, str]:
    age = rng.randrange(1, 100)
    return _result_text({"age": age}, str(age), rng), f"{asked[0]} is {age} years old."


def _product(asked: Arguments, rng: random.Random) -> tuple[str, str]:
    product = int(asked[0]) * int(asked[1])
    text = _result_text({rng.choice(("result", "product")): product}, str(product), rng)
    return text, f"{asked[0]} times {asked[1]} is {product}."


_RESULTS: dict[str, Callable[[Arguments, random.Random], tuple[str, str]]] = {
    "weather": _weather,
    "time": _time,
    "age": _age,
    "multiply": _product,
}
"""Draws the result of a call, and the sentence about it."""
