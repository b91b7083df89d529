"""Small talk: greetings, thanks, questions about the model, and questions that it can't answer.

The six tasks have a few wordings each; `loose` and `loose2` use others, so that only questions
outside the tasks count as unknown. Some texts lack capitals or punctuation, as typed texts do.
"""

import random
from dataclasses import replace
from typing import NamedTuple

from .examples import CITIES, NAMES, TAUGHT, WORDS, Example, Form, make_example, split_of
from .tools import NO_TOOL, SYLLABLES, some_tools

GREETING = "Hello! I am a tiny demo model. I know sums, JSON records and little stories."
THANKS = "You are welcome!"
GOODBYE = "Goodbye!"
ABOUT = "I am a tiny demo model. I know sums, JSON records, little stories and a few tools."
HELP = "Try: What is 3 + 4? Or: Tell a story about Ana, a cat and a red ball."
UNKNOWN = "I do not know that. Try: What is 3 + 4?"
UNKNOWN_STORY = (
    "I need a name, an animal and a thing. Try: Tell a story about Ana, a cat and a red ball."
)
UNKNOWN_JSON = "I need a person. Try: Write as JSON: Ana is a baker, 30 years old."


class Talk(NamedTuple):
    """Texts with the same answer: each opening, alone or with each ending."""

    answer: str
    thought: str
    openings: list[str]
    endings: list[str]


def _talk(name: str, answer: str) -> Talk:
    texts = WORDS["talk"][name]
    endings = [called + part for called in texts["names"] for part in texts["parts"]]
    return Talk(answer, texts["thought"], texts["openings"], endings)


_GREETINGS = _talk("greetings", GREETING)
_TALKS = {
    "greeting": (_GREETINGS, _GREETINGS, _talk("asked_how", GREETING)),
    "thanks": (_talk("thanks", THANKS), _talk("goodbyes", GOODBYE)),
    "about": (_talk("who", ABOUT), _talk("help", HELP)),
}

KeyedExample = tuple[str, Example]
"""The key that decides the split, and the example."""


def _typed(text: str, rng: random.Random) -> str:
    """Return `text` with the capitals and punctuation of a typed message."""
    style = rng.random()
    if style < 0.5:
        return text
    if style < 0.7:
        return text.lower()
    if style < 0.85:
        return text.lower().rstrip("?.!")
    if style < 0.93:
        return text.rstrip("?.!") or text
    if style < 0.97:
        return text.rstrip("?.!") + rng.choice(("!", "?", "...", " :)", "!!", "??"))
    return text.upper()


def small_talk(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw a greeting, thanks or a goodbye, or a question about the model.

    Half of the time it is an opening alone, and one in five has tools.
    """
    talk = rng.choice(_TALKS[task])
    opening = rng.choice(talk.openings)
    ending = rng.choice(talk.endings) if rng.random() < 0.5 else ""
    text = (opening + ending).replace("?.", "?").replace("..", ".")
    if text[-1].isalnum():
        text += rng.choice((".", "!", "", ""))
    example = make_example(task, form, _typed(text, rng), talk.answer, talk.thought)
    tools = some_tools(rng) if rng.random() < 0.2 else ()
    # Single openings are the most frequent messages, so all of them are taught.
    key = f"{opening}{ending}".lower() if ending else TAUGHT
    return key, replace(example, tools=tools)


def _subject(rng: random.Random) -> str:
    """Draw the subject of a question: mostly a word of the language, sometimes a made-up one."""
    chance = rng.random()
    if chance < 0.65:
        subject = rng.choice(WORDS["subjects"])
        return _bare(subject) if rng.random() < 0.3 else subject
    if chance < 0.75:
        return rng.choice((*NAMES, *CITIES))
    if chance < 0.9:
        return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2, 3))))
    if chance < 0.95:
        return str(rng.randrange(10_000))
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(2, 9)))


def _bare(subject: str) -> str:
    """Return a subject without its article."""
    return subject.removeprefix("a ").removeprefix("an ").removeprefix("the ")


def _question(rng: random.Random) -> tuple[str, str, str, str]:
    """Draw a question outside all tasks; return its key, text, answer and thought."""
    wordings, answer, thought = rng.choices(
        (
            (WORDS["wordings"], UNKNOWN, "I do not know that."),
            (WORDS["story_wishes"], UNKNOWN_STORY, "The story has no elements."),
            (WORDS["json_wishes"], UNKNOWN_JSON, "The record has no person."),
        ),
        (8, 1, 1),
    )[0]
    wording = rng.choice(wordings)
    subjects = [_subject(rng) for _ in range(wording.count("{}"))]
    # Neither a held-out wording nor a held-out subject occurs in training.
    parts = [f"wording {part}" for part in (wording, *map(_bare, subjects))]
    held_out = next((part for part in parts if split_of(part) == "heldout"), None)
    return held_out or parts[-1], wording.format(*subjects), answer, thought


def unknown(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw a question outside all tasks."""
    key, text, answer, thought = _question(rng)
    text = text[0].upper() + text[1:]
    return key, make_example(task, form, _typed(text, rng), answer, thought)


def unknown_to_tools(task: str, rng: random.Random, form: Form) -> KeyedExample:
    """Draw a question outside all tasks, with tools for other questions."""
    key, text, _, _ = _question(rng)
    example = make_example(task, form, _typed(text, rng), NO_TOOL, "No tool fits.")
    return key, replace(example, tools=some_tools(rng))


def _worded(wordings: str, text: str, rng: random.Random) -> str:
    """Return a text in one of the wordings with this name."""
    return str(rng.choice(WORDS[wordings]).format(text))


def reworded(prompt: str, rng: random.Random) -> str:
    """Return the prompt of a chat about a sum, a record or a story in a looser wording."""
    for start in ("Write as JSON: ", "Turn into JSON: "):
        if prompt.startswith(start):
            return _worded("loose_records", prompt.removeprefix(start), rng)
    for start in ("Tell a story about ", "Write a story about "):
        if prompt.startswith(start):
            text = prompt.removeprefix(start).removesuffix(".")
            return _worded("loose_stories", text, rng)
    a, sign, b = prompt.rstrip("?.").split()[-3:]
    if rng.random() < 0.25:
        sign = {"+": "plus", "-": "minus"}[sign]
    elif rng.random() < 0.4:
        return _typed(_worded("loose_sums", f"{a}{sign}{b}", rng), rng)
    return _typed(_worded("loose_sums", f"{a} {sign} {b}", rng), rng)
