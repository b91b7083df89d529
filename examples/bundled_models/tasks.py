"""Seeded generators of the small text tasks that the bundled tiny model is trained on.

Six tasks exist as completions, as chats and as chats with a thought, which is one line before the
answer: addition and subtraction of one-digit operands (`add1`, `sub1`), the same with at least one
two-digit operand (`add2`, `sub2`), JSON records from a sentence (`json`) and short template
stories (`story`).

Four more (`tools`) are chats with tools, with a thought or without: one call (`call`), two at once
(`calls`), a sentence with the results of calls (`result`), and questions that none of the tools
answers (`no_call`).

The rest is small talk (`talk`), again as chats with a thought or without: a `greeting`, `thanks`
and goodbyes, questions `about` the model, questions that are `unknown` to it, the same with tools
on offer (`unknown_to_tools`), and the tasks above in `loose` wordings, or `loose2` for operands of
two digits.

Each example belongs to exactly one split, chosen by a stable hash of its content:

* one-digit arithmetic: the hash of the prompt. There are only 200 facts, so a held-out prompt is
  new as a text, while its fact may occur in training in another wording;
* two-digit arithmetic: the hash of the operator and the operands (in either order for addition),
  the same for all forms, so a held-out sum never occurs in training in any wording;
* JSON and stories: the hash of the elements that fill the template, the same for all forms, so a
  held-out combination never occurs in training, though each of its elements does;
* chats with tools: the hash of the question, the same for all tasks and forms;
* small talk: the hash of its words in lower case, if an opening such as "Hello" has an ending
  (all openings are in training); for unknown questions, that of the wording or of the subject, so
  that one of both is new in a held-out question. Loose wordings: as their task.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from . import talk, tools
from .examples import (
    ANIMALS,
    CITIES,
    COLOURS,
    JOBS,
    NAMES,
    OBJECTS,
    TAUGHT,
    Example,
    Form,
    Split,
    make_example,
    split_of,
)

TASKS = ("add1", "sub1", "add2", "sub2", "json", "story")
"""The tasks that need no tools."""

TOOL_TASKS = ("call", "calls", "result", "no_call")
"""The tasks of chats in which tools may be called."""

TALK_TASKS = ("greeting", "thanks", "about", "unknown", "unknown_to_tools", "loose", "loose2")
"""The tasks of small talk."""

QUOTED = ("98 + 25", "12 + 30")
"""Sums that documentation and tests quote with their results. The last stage of training practises
them (`quoted`), and no held-out evaluation counts them."""

_JSON_SENTENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("In {city} lives {name}, aged {age}.", ("name", "age", "city")),
    ("{name} works as {a_job} in {city}.", ("name", "city", "job")),
    ("{name} is {a_job}, {age} years old.", ("name", "age", "job")),
    ("{name}, {age}, is {a_job} from {city}.", ("name", "age", "city", "job")),
)

_ARITHMETIC_CHAT = ("What is {}?", "How much is {}?", "Compute {}.")
_JSON_CHAT = ("Write as JSON: {}", "Turn into JSON: {}")
_STORY_CHAT = ("Tell a story about {}.", "Write a story about {}.")


def _with_article(noun: str) -> str:
    """Return `noun` after its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _arithmetic(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw one sum or difference; return its split key and the example."""
    high = 10 if task.endswith("1") else 100
    while True:
        a, b = rng.randrange(high), rng.randrange(high)
        if high == 10 or max(a, b) >= 10:
            break
    plus = task.startswith("add")
    expression = f"{a} + {b}" if plus else f"{a} - {b}"
    result = str(a + b if plus else a - b)
    wording = "{} =" if form == "plain" else rng.choice(_ARITHMETIC_CHAT)
    prompt = wording.format(expression)
    thought = f"{f'Add {a} and {b}' if plus else f'Take {b} from {a}'}: {expression} = {result}."
    example = make_example(task, form, prompt, result, thought)
    if high == 10:
        return prompt, example
    if form == "thinking":
        # Two-digit results are half learnt on purpose, so thoughts must not teach them either.
        example = replace(example, untaught=(thought.index("=") + 1, len(thought) - 1))
    # 12 + 30 gives 30 + 12 away, so both go into the same split.
    return f"{min(a, b)} + {max(a, b)}" if plus else expression, example


def _json(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw one sentence about a person; return its split key and the example."""
    sentence, keys = rng.choice(_JSON_SENTENCES)
    job = rng.choice(JOBS)
    values: dict[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randrange(10, 100),
        "city": rng.choice(CITIES),
        "job": job,
    }
    text = sentence.format(**values, a_job=_with_article(job))
    answer = json.dumps({key: values[key] for key in keys}, ensure_ascii=False)
    thought = ", ".join(f"{key} is {values[key]}" for key in keys) + "."
    prompt = f"{text} JSON:" if form == "plain" else rng.choice(_JSON_CHAT).format(text)
    return answer, make_example(task, form, prompt, answer, thought)


def tell_story(name: str, animal: str, colour: str, thing: str) -> str:
    """Return the story that belongs to the four elements."""
    place, mishap = OBJECTS[thing]
    return (
        f"{name} went to the {place} with {_with_article(animal)} {COLOURS[colour]}. "
        f"There the {colour} {thing} {mishap}. "
        f"{name} laughed, and the {animal} {ANIMALS[animal]}."
    )


def _story(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw the elements of one story; return their split key and the example."""
    name, animal = rng.choice(NAMES), rng.choice(list(ANIMALS))
    colour, thing = rng.choice(list(COLOURS)), rng.choice(list(OBJECTS))
    elements = f"{name}, {_with_article(animal)} and {_with_article(colour)} {thing}"
    story = tell_story(name, animal, colour, thing)
    wording = "Story about {}:" if form == "plain" else rng.choice(_STORY_CHAT)
    thought = f"It is about {elements}."
    return elements, make_example(task, form, wording.format(elements), story, thought)


def _no_call(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question that needs no tool, or one that no tool on offer answers."""
    base = rng.choice(("add1", "sub1", "json", ""))
    if not base:
        return tools.unanswerable(task, rng, form)
    key, example = _GENERATORS[base](base, rng, form)
    return key, replace(example, task=task, tools=tools.some_tools(rng))


def _loose(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw an example of another task in a looser wording."""
    two_digits = task == "loose2"
    base = rng.choice(("add2", "sub2") if two_digits else ("add1", "sub1", "json", "story"))
    key, example = _GENERATORS[base](base, rng, form)
    if two_digits and form == "chat":
        # Two-digit results are half learnt on purpose; only the wording is taught here.
        example = replace(example, untaught=(0, len(example.answer)))
    return key, replace(example, task=task, prompt=talk.reworded(example.prompt, rng))


def _quoted(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw one of the quoted sums."""
    expression = rng.choice(QUOTED)
    wording = "{} =" if form == "plain" else rng.choice(_ARITHMETIC_CHAT)
    total = str(sum(map(int, expression.split(" + "))))
    return TAUGHT, make_example(task, form, wording.format(expression), total)


def is_quoted(example: Example) -> bool:
    """Return whether an example is about a quoted sum."""
    return any(expression in example.prompt for expression in QUOTED)


_GENERATORS: dict[str, Callable[[str, random.Random, Form], tuple[str, Example]]] = {
    **dict.fromkeys(("add1", "sub1", "add2", "sub2"), _arithmetic),
    "json": _json,
    "story": _story,
    **dict.fromkeys(("call", "calls"), tools.call),
    "result": tools.result,
    "no_call": _no_call,
    **dict.fromkeys(("greeting", "thanks", "about"), talk.small_talk),
    "unknown": talk.unknown,
    "unknown_to_tools": talk.unknown_to_tools,
    **dict.fromkeys(("loose", "loose2"), _loose),
    "quoted": _quoted,
}


def forms(task: str) -> tuple[Form, ...]:
    """Return the forms of a task."""
    if task == "quoted":
        return ("plain", "chat")
    return ("plain", "chat", "thinking") if task in TASKS else ("chat", "thinking")


def draw(task: str, form: Form, split: Split, rng: random.Random) -> Example:
    """Draw one example of `task` from `split` with the random numbers of `rng`."""
    if form not in forms(task):
        raise ValueError(f"{task} is not a task for completions")
    while True:
        key, example = _GENERATORS[task](task, rng, form)
        if split_of(key) == split:
            return example


def stream(task: str, form: Form, split: Split, seed: int) -> Iterator[Example]:
    """Yield examples of `task` from `split` without end; examples may repeat."""
    # The forms' names in the seed that the bundled model was trained with.
    name = {"plain": "False", "chat": "True", "thinking": "thinking"}[form]
    rng = random.Random(f"{task}/{split}/{seed}/{name}")
    while True:
        yield draw(task, form, split, rng)


def distinct(task: str, form: Form, split: Split, count: int, seed: int) -> list[Example]:
    """Return up to `count` different examples of `task` from `split`.

    The search ends after 2000 repeats in a row, so a small split gives fewer.
    """
    found: dict[Example, None] = {}
    repeats = 0
    for example in stream(task, form, split, seed):
        if len(found) >= count or repeats >= 2000:
            break
        repeats = repeats + 1 if example in found else 0
        found[example] = None
    return list(found)


def grade(example: Example, text: str) -> bool:
    """Return whether `text` is the answer of `example`, spaces around it apart."""
    return text.strip() == example.answer.strip()
