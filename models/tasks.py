"""Seeded generators of the small text tasks that the bundled tiny model is trained on.

Six tasks exist as completions, as chats and as chats with a thought: addition and subtraction of
one-digit operands (``add1``, ``sub1``), the same with at least one two-digit operand (``add2``,
``sub2``), JSON records from a sentence (``json``) and short template stories (``story``). In a
completion, the prompt is the text to go on with; in a chat, it is a user message whose answer is
the assistant's reply. A thought is one line before the answer.

Four more (:mod:`.tools`) are chats, with a thought or without, in which tools may be called: one
call (``call``), two at once (``calls``), a sentence with what the tools have brought (``result``),
and questions that none of the tools answers (``no_call``).

The rest is small talk (:mod:`.talk`), again as chats with a thought or without: a ``greeting``,
``thanks`` and goodbyes, questions ``about`` the model, questions that are ``unknown`` to it, the
same where tools are offered (``unknown_to_tools``), and the tasks above in ``loose`` wordings, or
``loose2`` for operands of two digits.

Each example belongs to exactly one split, chosen by a stable hash of its content:

* one-digit arithmetic: the hash of the prompt. There are only 200 facts, so a held-out prompt is
  new as a text, while its fact may occur in training in another wording;
* two-digit arithmetic: the hash of the operator and the operands (in either order for addition),
  the same for all forms, so a held-out sum never occurs in training in any wording;
* JSON and stories: the hash of the elements that fill the template, the same for all forms, so a
  held-out combination never occurs in training, though each of its elements does;
* chats with tools: the hash of the question, the same for all tasks and forms;
* small talk: the hash of its words without capitals, where an opening such as "Hello" has an ending
  behind it (all openings are in training); for unknown questions, that of the wording or of the
  subject, so that one of both is new in a held-out question. Loose wordings: as their task.

The modules need only the standard library.
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
    Example,
    Form,
    Split,
    split_of,
    thought_first,
)

__all__ = [
    "QUOTED",
    "TALK_TASKS",
    "TASKS",
    "TOOL_TASKS",
    "Example",
    "Form",
    "Split",
    "distinct",
    "draw",
    "forms",
    "grade",
    "is_quoted",
    "stream",
    "tell_story",
]

TASKS: tuple[str, ...] = ("add1", "sub1", "add2", "sub2", "json", "story")
"""The tasks that need no tools."""

TOOL_TASKS: tuple[str, ...] = ("call", "calls", "result", "no_call")
"""The tasks of chats in which tools may be called."""

TALK_TASKS: tuple[str, ...] = (
    *("greeting", "thanks", "about", "unknown", "unknown_to_tools", "loose", "loose2"),
)
"""The tasks of small talk."""

QUOTED: tuple[str, ...] = ("98 + 25", "12 + 30")
"""Sums that documentation and tests quote with their results. The last stage of training practises
them (``quoted``), and no held-out evaluation counts them."""

_JSON_SENTENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
    ("In {city} lives {name}, aged {age}.", ("name", "age", "city")),
    ("{name} works as {a_job} in {city}.", ("name", "city", "job")),
    ("{name} is {a_job}, {age} years old.", ("name", "age", "job")),
    ("{name}, {age}, is {a_job} from {city}.", ("name", "age", "city", "job")),
)

_ARITHMETIC_CHAT: tuple[str, ...] = ("What is {}?", "How much is {}?", "Compute {}.")
_JSON_CHAT: tuple[str, ...] = ("Write as JSON: {}", "Turn into JSON: {}")
_STORY_CHAT: tuple[str, ...] = ("Tell a story about {}.", "Write a story about {}.")


def _with_article(noun: str) -> str:
    """Return ``noun`` after its indefinite article."""
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
    # 12 + 30 gives 30 + 12 away, so both go into the same split.
    fact = f"{min(a, b)} + {max(a, b)}" if plus else expression
    key = prompt if high == 10 else fact
    if form != "thinking":
        return key, _example(task, prompt, result, form)
    order = f"Add {a} and {b}" if plus else f"Take {b} from {a}"
    thought = f"{order}: {expression} = {result}."
    example = _example(task, prompt, result, form, thought)
    if high == 10:
        return key, example
    # What two digits make is half learnt on purpose, so thoughts must not teach it either.
    start = thought.index("=") + 1
    return key, replace(example, untaught=(start, len(thought) - 1))


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
    if form == "plain":
        return answer, _example(task, f"{text} JSON:", answer, form)
    thought = ", ".join(f"{key} is {values[key]}" for key in keys) + "."
    prompt = rng.choice(_JSON_CHAT).format(text)
    return answer, _example(task, prompt, answer, form, thought)


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
    if form == "plain":
        return elements, _example(task, f"Story about {elements}:", story, form)
    prompt = rng.choice(_STORY_CHAT).format(elements)
    return elements, _example(task, prompt, story, form, f"It is about {elements}.")


def _example(task: str, prompt: str, answer: str, form: Form, thought: str = "") -> Example:
    """Return the example in its form."""
    if form == "plain":
        return Example(task, prompt, f" {answer}")
    if form == "chat":
        return Example(task, prompt, answer, chat=True)
    return Example(task, prompt, thought_first(thought, answer), chat=True, thinking=True)


def _no_call(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw a question that needs no tool, or one that no tool there is answers."""
    base = rng.choice(("add1", "sub1", "json", ""))
    if not base:
        return tools.unanswerable(task, rng, form)
    key, example = _GENERATORS[base](base, rng, form)
    return key, replace(example, task=task, tools=tools.some_tools(rng))


def _loose(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw an example of another task, asked for in a looser wording."""
    two_digits = task == "loose2"
    base = rng.choice(("add2", "sub2") if two_digits else ("add1", "sub1", "json", "story"))
    key, example = _GENERATORS[base](base, rng, form)
    if two_digits and form == "chat":
        # What two digits make is half learnt on purpose; here only how it is asked for is taught.
        example = replace(example, untaught=(0, len(example.answer)))
    return key, replace(example, task=task, prompt=talk.reworded(example.prompt, rng))


def _quoted(task: str, rng: random.Random, form: Form) -> tuple[str, Example]:
    """Draw one of the quoted sums."""
    expression = rng.choice(QUOTED)
    a, b = expression.split(" + ")
    wording = "{} =" if form == "plain" else rng.choice(_ARITHMETIC_CHAT)
    return "taught", _example(task, wording.format(expression), str(int(a) + int(b)), form)


def is_quoted(example: Example) -> bool:
    """Tell whether an example asks for a quoted sum."""
    return any(expression in example.prompt for expression in QUOTED)


_GENERATORS: dict[str, Callable[[str, random.Random, Form], tuple[str, Example]]] = {
    "add1": _arithmetic,
    "sub1": _arithmetic,
    "add2": _arithmetic,
    "sub2": _arithmetic,
    "json": _json,
    "story": _story,
    "call": tools.call,
    "calls": tools.call,
    "result": tools.result,
    "no_call": _no_call,
    "greeting": talk.greeting,
    "thanks": talk.thanks,
    "about": talk.about,
    "unknown": talk.unknown,
    "unknown_to_tools": talk.unknown_to_tools,
    "loose": _loose,
    "loose2": _loose,
    "quoted": _quoted,
}


def forms(task: str) -> tuple[Form, ...]:
    """Return the forms that a task has."""
    if task == "quoted":
        return ("plain", "chat")
    return ("plain", "chat", "thinking") if task in TASKS else ("chat", "thinking")


def draw(
    task: str, split: Split, rng: random.Random, *, chat: bool = False, thinking: bool = False
) -> Example:
    """Draw one example of ``task`` from ``split`` with the random numbers of ``rng``.

    ``thinking`` asks for a chat in which a thought precedes the answer.
    """
    generate = _GENERATORS[task]
    form: Form = "thinking" if thinking else "chat" if chat else "plain"
    if form not in forms(task):
        raise ValueError(f"{task} is not a task for completions")
    while True:
        key, example = generate(task, rng, form)
        if split_of(key) == split:
            return example


def stream(
    task: str, split: Split, seed: int, *, chat: bool = False, thinking: bool = False
) -> Iterator[Example]:
    """Yield examples of ``task`` from ``split`` for ever; examples may repeat."""
    rng = random.Random(f"{task}/{split}/{seed}/{'thinking' if thinking else chat}")
    while True:
        yield draw(task, split, rng, chat=chat, thinking=thinking)


def distinct(
    task: str,
    split: Split,
    count: int,
    seed: int,
    *,
    chat: bool = False,
    thinking: bool = False,
) -> list[Example]:
    """Return up to ``count`` different examples of ``task`` from ``split``.

    Fewer come back where the split is smaller than that: the search ends after 2000 repeats in a
    row.
    """
    found: dict[Example, None] = {}
    repeats = 0
    for example in stream(task, split, seed, chat=chat, thinking=thinking):
        if len(found) >= count or repeats >= 2000:
            break
        repeats = repeats + 1 if example in found else 0
        found[example] = None
    return list(found)


def grade(example: Example, text: str) -> bool:
    """Tell whether ``text`` is the answer of ``example``, spaces around it apart."""
    return text.strip() == example.answer.strip()
