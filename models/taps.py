"""How often an example of each kind is drawn for training."""

from dataclasses import dataclass

from . import tasks
from .evaluation import Example, Kind, Model, distinct, evaluate, kinds_of
from .settings import Settings
from .tokenizer import FastTokenizer

# How often an example of each task is drawn, by form: plain, chat, thinking.
Weights = dict[str, tuple[float, float, float]]
WEIGHTS: Weights = {
    "add1": (10.0, 6.0, 2.0),
    "sub1": (10.0, 6.0, 2.0),
    "add2": (30.0, 12.0, 1.5),
    "sub2": (30.0, 12.0, 1.5),
    "json": (6.0, 5.0, 2.5),
    "story": (3.0, 3.0, 1.0),
    "call": (0.0, 3.0, 1.0),
    "calls": (0.0, 2.5, 1.0),
    "result": (0.0, 6.0, 1.5),
    "no_call": (0.0, 3.5, 1.5),
}

# The same in the second stage, which is for chats with tools and thoughts.
TOOL_WEIGHTS: Weights = {
    "add1": (3.0, 3.0, 3.0),
    "sub1": (4.0, 3.0, 3.0),
    "add2": (10.0, 4.0, 3.0),
    "sub2": (10.0, 4.0, 3.0),
    "json": (3.0, 3.0, 2.5),
    "story": (1.5, 1.5, 2.0),
    "call": (0.0, 6.0, 2.5),
    "calls": (0.0, 4.0, 2.0),
    "result": (0.0, 14.0, 5.0),
    "no_call": (0.0, 5.0, 2.5),
}

# The same in the third stage, which adds small talk.
TALK_WEIGHTS: Weights = {
    "add1": (3.0, 3.0, 2.0),
    "sub1": (4.0, 3.0, 2.0),
    "add2": (10.0, 4.0, 2.0),
    "sub2": (10.0, 4.0, 2.0),
    "json": (2.5, 2.5, 2.0),
    "story": (1.5, 1.5, 2.0),
    "call": (0.0, 6.0, 2.5),
    "calls": (0.0, 4.0, 2.0),
    "result": (0.0, 12.0, 4.5),
    "no_call": (0.0, 5.0, 2.5),
    "greeting": (0.0, 2.5, 1.0),
    "thanks": (0.0, 2.0, 0.7),
    "about": (0.0, 2.5, 1.0),
    "unknown": (0.0, 14.0, 4.0),
    "unknown_to_tools": (0.0, 3.0, 1.0),
    "loose": (0.0, 6.0, 1.5),
    "loose2": (0.0, 3.0, 0.5),
}


@dataclass(frozen=True)
class Tap:
    """How the weight of a task follows its accuracy on the tune split."""

    target: float  # From this accuracy on, the weight is multiplied by ``closed``.
    closed: float
    opening: int  # The step before which the tap stays closed.


# One-digit arithmetic comes first: the other digits of a sum build on the same table of facts.
TAPS: dict[str, Tap] = {
    "add2": Tap(0.52, 0.05, 600),
    "sub2": Tap(0.52, 0.05, 600),
}


class Taps:
    """Hold the weights of all kinds of examples, small ones where a kind is known well enough."""

    def __init__(self, settings: Settings) -> None:
        """Open the taps that have no opening step."""
        self.table = WEIGHTS
        self.tight = False
        kinds = kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS)
        self.weights: dict[Kind, float] = {kind: self.weight(kind) for kind in kinds}
        self.prompts: dict[Kind, list[Example]] = {}
        for kind in kinds_of(*TAPS):
            # What these make is not taught in thoughts.
            if kind[1] != "thinking":
                self.prompts[kind] = distinct(kind, "tune", settings.tap_prompts, settings.seed)
                self.set(kind, is_open=TAPS[kind[0]].opening == 0)

    def weight(self, kind: Kind) -> float:
        """Return how often an example of a kind is drawn while nothing holds it back."""
        task, form = kind
        return self.table.get(task, (0.0, 0.0, 0.0))[("plain", "chat", "thinking").index(form)]

    def set(self, kind: Kind, *, is_open: bool) -> None:
        """Open or close the tap of ``kind``."""
        closed = 0.0 if self.tight else TAPS[kind[0]].closed
        self.weights[kind] = self.weight(kind) * (1.0 if is_open else closed)

    def measure(self, model: Model, tokenizer: FastTokenizer) -> dict[Kind, float]:
        """Return the accuracy of each tapped kind on the tune split."""
        return {
            kind: evaluate(model, tokenizer, prompts) / len(prompts)
            for kind, prompts in self.prompts.items()
        }

    def turn(self, model: Model, tokenizer: FastTokenizer, step: int) -> str:
        """Open or close the taps whose step has come, and return a line for the log."""
        words = []
        if all(step < tap.opening for tap in TAPS.values()):
            return "taps closed"
        for (task, form), share in self.measure(model, tokenizer).items():
            is_open = step >= TAPS[task].opening and share < TAPS[task].target
            self.set((task, form), is_open=is_open)
            words.append(f"{task} {form} {share:.2f}{'+' if is_open else '-'}")
        return ", ".join(words)
