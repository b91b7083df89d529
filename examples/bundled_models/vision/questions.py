"""Questions about a picture, and their answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .pictures import COLOURS, PLACES, SHAPES, Scene, Thing

NO_NUMBER = "There is no number."
NOTHING = "nothing"


@dataclass(frozen=True)
class Question:
    """A question of a task, and its answer."""

    task: str
    text: str
    answer: str


def questions(scene: Scene, rng: random.Random, most: int) -> list[Question]:
    """Return some questions about a scene in random order, at most `most`, of many tasks."""
    found = list(_about_number(scene, rng) if scene.number else _about_shapes(scene, rng))
    rng.shuffle(found)
    return found[:most]


def question(scene: Scene, task: str, rng: random.Random) -> Question | None:
    """Return a random question of a task; None if the scene is too plain or rich for it."""
    found = [each for each in questions(scene, rng, 99) if each.task == task]
    return found[0] if found else None


TASKS = ("count", "colour", "shape", "position", "place", "exists", "describe", "number")


def article(name: str) -> str:
    """Return a noun with its article."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def describe(scene: Scene) -> str:
    """Return the answer to a question about all of a picture."""
    if scene.number:
        return f"the number {scene.number} in {scene.colour}"
    *first, last = (article(thing.name) for thing in scene.things)
    return f"{', '.join(first)} and {last}" if first else last


def _about_number(scene: Scene, rng: random.Random) -> Iterator[Question]:
    ask = rng.choice(("What number is this?", "Which number do you see?", "Read the number."))
    yield Question("number", ask, scene.number)
    ask = rng.choice(("What {} is the number?", "Which {} does the number have?"))
    yield Question("colour", ask.format(_colour_word(rng)), scene.colour)
    if rng.random() < 0.5:
        yield Question("describe", _describe(rng), describe(scene))
    if rng.random() < 0.15:
        yield Question("count", *_count(f"{rng.choice(SHAPES)}s", 0, rng))


def _about_shapes(scene: Scene, rng: random.Random) -> Iterator[Question]:
    things = scene.things
    for shape in SHAPES:
        held = [thing for thing in things if thing.shape == shape]
        if held or rng.random() < 0.3:
            yield Question("count", *_count(f"{shape}s", len(held), rng))
        if len(held) == 1:
            ask = rng.choice(("What {} is the {}?", "Which {} does the {} have?"))
            yield Question("colour", ask.format(_colour_word(rng), shape), held[0].colour)
            yield Question("position", f"Where is the {shape}?", PLACES[held[0].place])
    yield Question("count", *_count("shapes", len(things), rng))
    colour = rng.choice(things).colour if rng.random() < 0.7 else rng.choice(list(COLOURS))
    alike = [thing for thing in things if thing.colour == colour]
    yield Question("count", *_count(f"{colour} shapes", len(alike), rng))
    for thing in _unique(things, lambda thing: thing.colour):
        yield Question(
            "shape", f"{rng.choice(('What', 'Which'))} shape is {thing.colour}?", thing.shape
        )
    for thing in _unique(things, lambda thing: thing.name):
        yield Question("position", f"Where is the {thing.name}?", PLACES[thing.place])
    yield _at_place(scene, rng)
    yield _at_place(scene, rng)
    yield _exists(scene, rng)
    yield Question("describe", _describe(rng), describe(scene))
    if rng.random() < 0.1:
        yield Question("number", "What number is this?", NO_NUMBER)


def _unique(things: tuple[Thing, ...], of: Callable[[Thing], str]) -> list[Thing]:
    names = [of(thing) for thing in things]
    return [thing for thing, name in zip(things, names, strict=True) if names.count(name) == 1]


def _at_place(scene: Scene, rng: random.Random) -> Question:
    held = {thing.place: article(thing.name) for thing in scene.things}
    place = rng.choice(list(held)) if rng.random() < 0.7 else rng.randrange(len(PLACES))
    where = f"{'in' if PLACES[place] == 'middle' else 'at'} the {PLACES[place]}"
    return Question("place", f"What is {where}?", held.get(place, NOTHING))


def _exists(scene: Scene, rng: random.Random) -> Question:
    names = [thing.name for thing in scene.things]
    if rng.random() < 0.5:
        name = rng.choice(names)
    else:
        # A shape and a colour of the picture, which seldom go together.
        name = f"{rng.choice(scene.things).colour} {rng.choice(SHAPES)}"
    return Question("exists", f"Is there {article(name)}?", "yes" if name in names else "no")


def _count(what: str, number: int, rng: random.Random) -> tuple[str, str]:
    ask = rng.choice(("How many {} are there?", "How many {} do you see?", "Count the {}."))
    return ask.format(what), str(number)


def _describe(rng: random.Random) -> str:
    return rng.choice(("What do you see?", "What is in the picture?", "Describe the picture."))


def _colour_word(rng: random.Random) -> str:
    return rng.choice(("colour", "color"))
