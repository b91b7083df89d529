"""Chats with tools: questions that a tool answers, the calls, and what is said of the results.

Names, descriptions and parameters of a tool vary, so a call has to be read off the tools in the
system turn. So do the places and people asked about: some are made up of syllables.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from .examples import CITIES, NAMES, Example, Form, call_text, thought_first


@dataclass(frozen=True)
class Kind:
    """What a tool is for, in all its wordings."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    # Each with the description that a schema may have of it.
    parameters: tuple[tuple[tuple[str, str], ...], ...]
    type: str
    questions: tuple[str, ...]
    # About two at once; none where that is never asked.
    of_two: tuple[str, ...]


KINDS: dict[str, Kind] = {
    "weather": Kind(
        ("get_weather", "get_current_weather", "weather"),
        (
            "Get the weather in a city",
            "Get the current weather for a city.",
            "Current weather",
            "Weather",
        ),
        ((("city", "The city"),), (("location", "The city"),), (("place", "A city"),)),
        "string",
        (
            "What is the weather in {}?",
            "What's the weather in {}?",
            "What is the weather like in {}?",
            "How is the weather in {}?",
            "Tell me the weather in {}.",
        ),
        ("What is the weather in {} and {}?", "What is the weather in {} and in {}?"),
    ),
    "time": Kind(
        ("get_time", "get_current_time", "time"),
        (
            "Get the time in a city",
            "Get the current time for a city.",
            "Current local time",
            "Time",
        ),
        ((("city", "The city"),), (("location", "The city"),), (("place", "A city"),)),
        "string",
        (
            "What time is it in {}?",
            "What is the time in {}?",
            "What's the time in {}?",
            "Tell me the time in {}.",
        ),
        ("What time is it in {} and {}?", "What time is it in {} and in {}?"),
    ),
    "age": Kind(
        ("get_age", "find_age", "age"),
        ("Get the age of a person", "How old a person is", "Find an age"),
        ((("name", "The name"),), (("person", "The name"),)),
        "string",
        ("How old is {}?", "What is the age of {}?"),
        ("How old are {} and {}?",),
    ),
    "multiply": Kind(
        ("multiply", "multiply_numbers", "times"),
        ("Multiply two numbers", "The product of two numbers", "Multiply"),
        (
            (("a", "First number"), ("b", "Second number")),
            (("x", "First number"), ("y", "Second number")),
        ),
        "integer",
        ("What is {} times {}?", "Multiply {} by {}.", "How much is {} times {}?"),
        (),
    ),
}

SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "stormy", "snowy")

SYLLABLES = (
    *("ka", "mo", "ri", "ta", "ven", "lu", "sha", "bor", "ne", "do", "pi", "gar", "wel", "zu"),
    *("cha", "fe", "hol", "ja", "xi", "qua", "stu", "by", "ton", "ville", "berg", "ko"),
)

NO_TOOL = "I have no tool for that."
"""The answer to a question that only a tool could answer, where there is none for it."""

Asked = tuple[str | int, ...]
"""The arguments of one call."""


@dataclass(frozen=True)
class Question:
    """A question with the tools that there are, and the calls that answer it."""

    kind: str
    text: str
    tool: str
    tools: tuple[str, ...]
    asked: tuple[Asked, ...]
    calls: tuple[str, ...]


def _tool(kind: str, rng: random.Random) -> tuple[str, tuple[str, ...], str]:
    """Draw the wording of a tool; return its name, its parameters and its function as JSON."""
    words = KINDS[kind]
    name = rng.choice(words.names)
    parameters = rng.choice(words.parameters)
    described, titled = rng.random() < 0.1, rng.random() < 0.1
    properties = {
        parameter: ({"title": parameter.capitalize()} if titled else {})
        | {"type": words.type}
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
        function["description"] = rng.choice(words.descriptions)
    function["parameters"] = schema
    return name, names, json.dumps(function)


def some_tools(rng: random.Random, without: str = "") -> tuple[str, ...]:
    """Draw one to three tools, none of them of the kind ``without``."""
    kinds = [kind for kind in KINDS if kind != without]
    chosen = rng.sample(kinds, rng.choices((1, 2, 3), (5, 3, 2))[0])
    return tuple(_tool(kind, rng)[2] for kind in chosen)


def _asked(kind: str, rng: random.Random) -> Asked:
    """Draw what one call asks about."""
    if kind == "multiply":
        return rng.randrange(2, 100), rng.randrange(2, 100)
    if rng.random() < 0.35:
        word = "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()
        return (f"{rng.choice(('San', 'New', 'Port'))} {word}" if rng.random() < 0.2 else word,)
    return (rng.choice(NAMES if kind == "age" else CITIES),)


def _question(rng: random.Random, *, two: bool) -> Question:
    """Draw a question about one thing or two, with a tool that answers it and others."""
    kind = rng.choice([kind for kind, words in KINDS.items() if words.of_two or not two])
    asked: tuple[Asked, ...] = (_asked(kind, rng),)
    while two and len(asked) < 2:
        other = _asked(kind, rng)
        asked += (other,) if other not in asked else ()
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
        for values in asked
    )
    text = wording.format(*(value for values in asked for value in values))
    return Question(kind, text, name, tuple(tools), asked, calls)


def _example(task: str, question: Question, answer: str, thought: str, form: Form) -> Example:
    thinking = form == "thinking"
    text = thought_first(thought, answer) if thinking else answer
    return Example(task, question.text, text, True, thinking, question.tools)


def call(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question that one call answers, or two calls where the task is ``calls``."""
    two = task == "calls"
    question = _question(rng, two=two)
    thought = f"Use {question.tool}{' twice' if two else ''}."
    return question.text, _example(task, question, call_text(question.calls), thought, form)


def result(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question with its calls and what they have brought; the answer is a sentence each."""
    question = _question(rng, two=rng.random() < 0.35)
    told = [_TELL[question.kind](values, rng) for values in question.asked]
    answer = " ".join(sentence for _, sentence in told)
    example = _example(task, question, answer, f"{question.tool} has answered.", form)
    results = tuple(text for text, _ in told)
    return question.text, replace(example, calls=question.calls, results=results)


def unanswerable(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question for which there is no tool, though there may be others."""
    question = _question(rng, two=rng.random() < 0.2)
    tools = some_tools(rng, without=question.kind) if rng.random() < 0.7 else ()
    example = _example(task, question, NO_TOOL, "No tool fits.", form)
    return question.text, replace(example, tools=tools)


def _brought(values: dict[str, str | int], plain: str, rng: random.Random) -> str:
    """Return a result as a tool gives it: as JSON, or as text."""
    if rng.random() < 0.5:
        return plain
    return json.dumps(dict(rng.sample(list(values.items()), len(values))), ensure_ascii=False)


def _tell_weather(asked: Asked, rng: random.Random) -> tuple[str, str]:
    sky, degrees = rng.choice(SKIES), rng.randrange(-15, 40)
    told = rng.random()
    if told < 0.25:
        brought = _brought({rng.choice(("weather", "condition")): sky}, sky, rng)
        return brought, f"It is {sky} in {asked[0]}."
    if told < 0.4:
        brought = _brought({"temperature": degrees}, f"{degrees} degrees", rng)
        return brought, f"It is {degrees} degrees in {asked[0]}."
    values: dict[str, str | int] = {
        rng.choice(("temperature", "degrees")): degrees,
        rng.choice(("weather", "condition")): sky,
    }
    plain = rng.choice(("{0}, {1} degrees", "{1} degrees, {0}", "{0} and {1} degrees"))
    brought = _brought(values, plain.format(sky, degrees), rng)
    return brought, f"It is {sky} in {asked[0]}, {degrees} degrees."


def _tell_time(asked: Asked, rng: random.Random) -> tuple[str, str]:
    time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return _brought({"time": time}, time, rng), f"It is {time} in {asked[0]}."


def _tell_age(asked: Asked, rng: random.Random) -> tuple[str, str]:
    age = rng.randrange(1, 100)
    return _brought({"age": age}, str(age), rng), f"{asked[0]} is {age} years old."


def _tell_product(asked: Asked, rng: random.Random) -> tuple[str, str]:
    product = int(asked[0]) * int(asked[1])
    key = rng.choice(("result", "product"))
    return _brought({key: product}, str(product), rng), f"{asked[0]} times {asked[1]} is {product}."


_TELL: dict[str, Callable[[Asked, random.Random], tuple[str, str]]] = {
    "weather": _tell_weather,
    "time": _tell_time,
    "age": _tell_age,
    "multiply": _tell_product,
}
"""Draws what a call brings, and the sentence about it."""
