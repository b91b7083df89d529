"""Seeded generators of the small text tasks that the bundled tiny model is trained on.

Six tasks exist: addition and subtraction of one-digit operands (``add1``, ``sub1``), the same with
at least one two-digit operand (``add2``, ``sub2``), JSON records from a sentence (``json``) and
short template stories (``story``). Every task comes in two forms: a plain completion, and a user
message whose answer is the assistant's reply.

Each example belongs to exactly one split, chosen by a stable hash of its content:

* one-digit arithmetic: the hash of the prompt. There are only 200 facts, so a held-out prompt is
  new as a text, while its fact may occur in training in another wording;
* two-digit arithmetic: the hash of the operator and the operands (in either order for addition),
  the same for both forms, so a held-out sum never occurs in training in any wording;
* JSON and stories: the hash of the elements that fill the template, the same for both forms, so a
  held-out combination never occurs in training, though each of its elements does.

The module needs only the standard library.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "tune", "heldout"]

TASKS: tuple[str, ...] = ("add1", "sub1", "add2", "sub2", "json", "story")
"""The names of all tasks."""


@dataclass(frozen=True)
class Example:
    """One prompt with its only right answer.

    ``prompt`` is the text to complete, or the user message where ``chat`` is true. ``answer`` is
    the text that must follow: a plain answer begins with a space, a chat answer does not. The end
    of the answer (an end-of-sequence token) is not a part of it.
    """

    task: str
    prompt: str
    answer: str
    chat: bool = False


NAMES: tuple[str, ...] = (
    *("Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas"),
    *("Karen", "Leo", "Maria", "Nora", "Oscar", "Paula", "Quinn", "Rosa", "Sam", "Tara"),
    *("Uma", "Victor", "Wendy", "Yusuf"),
    *(
        "José",
        "Zoë",
        "Łukasz",
        "Søren",
        "Chloé",
        "Jürgen",
        "İpek",
        "小明",
        "さくら",
        "Олег",
        "Ελένη",
    ),
)

CITIES: tuple[str, ...] = (
    *("Oslo", "Lima", "Paris", "Rome", "Berlin", "Madrid", "Cairo", "Boston", "Dublin", "Vienna"),
    *("Nairobi", "Sydney", "Mumbai", "Prague", "Toronto", "Athens"),
    *("Kraków", "Zürich", "São Paulo", "Malmö", "Київ", "東京"),
)

JOBS: tuple[str, ...] = (
    *("baker", "teacher", "nurse", "pilot", "farmer", "painter", "engineer", "lawyer"),
    *("singer", "doctor", "chef", "artist"),
)

# What an animal does at the end of a story, where an object takes the story, and the time of day
# that a colour stands for: the tables that make a story a function of its elements.
ANIMALS: dict[str, str] = {
    "cat": "purred softly",
    "dog": "barked twice",
    "fox": "ran in circles",
    "owl": "closed one eye",
    "horse": "shook its head",
    "rabbit": "jumped for joy",
    "duck": "splashed about",
    "bear": "fell asleep",
    "mouse": "hid under a leaf",
    "parrot": "sang a song",
}

OBJECTS: dict[str, tuple[str, str]] = {
    "ball": ("garden", "rolled away"),
    "kite": ("hill", "flew too high"),
    "boat": ("river", "drifted off"),
    "hat": ("beach", "blew away"),
    "book": ("library", "got lost"),
    "lamp": ("cellar", "went out"),
    "drum": ("square", "broke in two"),
    "basket": ("market", "fell over"),
    "umbrella": ("station", "turned inside out"),
    "bike": ("park", "lost a wheel"),
}

COLOURS: dict[str, str] = {
    "red": "one sunny morning",
    "blue": "one rainy day",
    "green": "one spring afternoon",
    "yellow": "one summer day",
    "white": "one cold winter night",
    "black": "late one evening",
    "orange": "one windy autumn day",
    "purple": "just before dawn",
}

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


def split_of(key: str) -> Split:
    """Return the split of the content ``key``: 85 % train, 5 % tune, 10 % held out."""
    digest = hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % 20
    if bucket < 2:
        return "heldout"
    return "tune" if bucket == 2 else "train"


def _with_article(noun: str) -> str:
    """Return ``noun`` after its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _arithmetic(task: str, rng: random.Random, chat: bool) -> tuple[str, Example]:
    """Draw one sum or difference; return its split key and the example."""
    high = 10 if task.endswith("1") else 100
    while True:
        a, b = rng.randrange(high), rng.randrange(high)
        if high == 10 or max(a, b) >= 10:
            break
    plus = task.startswith("add")
    expression = f"{a} + {b}" if plus else f"{a} - {b}"
    result = str(a + b if plus else a - b)
    wording = rng.choice(_ARITHMETIC_CHAT) if chat else "{} ="
    prompt = wording.format(expression)
    # 12 + 30 gives 30 + 12 away, so both go into the same split.
    fact = f"{min(a, b)} + {max(a, b)}" if plus else expression
    return prompt if high == 10 else fact, Example(
        task, prompt, result if chat else f" {result}", chat
    )


def _json(task: str, rng: random.Random, chat: bool) -> tuple[str, Example]:
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
    if chat:
        return answer, Example(task, rng.choice(_JSON_CHAT).format(text), answer, True)
    return answer, Example(task, f"{text} JSON:", f" {answer}")


def tell_story(name: str, animal: str, colour: str, thing: str) -> str:
    """Return the story that belongs to the four elements."""
    place, mishap = OBJECTS[thing]
    return (
        f"{name} went to the {place} with {_with_article(animal)} {COLOURS[colour]}. "
        f"There the {colour} {thing} {mishap}. "
        f"{name} laughed, and the {animal} {ANIMALS[animal]}."
    )


def _story(task: str, rng: random.Random, chat: bool) -> tuple[str, Example]:
    """Draw the elements of one story; return their split key and the example."""
    name, animal = rng.choice(NAMES), rng.choice(list(ANIMALS))
    colour, thing = rng.choice(list(COLOURS)), rng.choice(list(OBJECTS))
    elements = f"{name}, {_with_article(animal)} and {_with_article(colour)} {thing}"
    story = tell_story(name, animal, colour, thing)
    if chat:
        return elements, Example(task, rng.choice(_STORY_CHAT).format(elements), story, True)
    return elements, Example(task, f"Story about {elements}:", f" {story}")


_GENERATORS: dict[str, Callable[[str, random.Random, bool], tuple[str, Example]]] = {
    "add1": _arithmetic,
    "sub1": _arithmetic,
    "add2": _arithmetic,
    "sub2": _arithmetic,
    "json": _json,
    "story": _story,
}


def draw(task: str, split: Split, rng: random.Random, *, chat: bool = False) -> Example:
    """Draw one example of ``task`` from ``split`` with the random numbers of ``rng``."""
    generate = _GENERATORS[task]
    while True:
        key, example = generate(task, rng, chat)
        if split_of(key) == split:
            return example


def stream(task: str, split: Split, seed: int, *, chat: bool = False) -> Iterator[Example]:
    """Yield examples of ``task`` from ``split`` for ever; examples may repeat."""
    rng = random.Random(f"{task}/{split}/{seed}/{chat}")
    while True:
        yield draw(task, split, rng, chat=chat)


def distinct(
    task: str, split: Split, count: int, seed: int, *, chat: bool = False
) -> list[Example]:
    """Return up to ``count`` different examples of ``task`` from ``split``.

    Fewer come back where the split is smaller than that: the search ends after 2000 repeats in a
    row.
    """
    found: dict[Example, None] = {}
    repeats = 0
    for example in stream(task, split, seed, chat=chat):
        if len(found) >= count or repeats >= 2000:
            break
        repeats = repeats + 1 if example in found else 0
        found[example] = None
    return list(found)


def grade(example: Example, text: str) -> bool:
    """Tell whether ``text`` is the answer of ``example``, spaces around it apart."""
    return text.strip() == example.answer.strip()
