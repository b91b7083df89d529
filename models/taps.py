"""How often an example of each kind is drawn for training."""

from . import tasks
from .evaluation import Kind, Model, evaluate, kinds_of
from .examples import Example
from .settings import Settings
from .tokenizer import FastTokenizer

# Weights of each task by form (plain, chat, thinking) in the three stages: all tasks; chats with
# tools and thoughts; small talk added.
WEIGHTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "add1": ((10.0, 6.0, 2.0), (3.0, 3.0, 3.0), (3.0, 3.0, 2.0)),
    "sub1": ((10.0, 6.0, 2.0), (4.0, 3.0, 3.0), (4.0, 3.0, 2.0)),
    "add2": ((30.0, 12.0, 1.5), (10.0, 4.0, 3.0), (10.0, 4.0, 2.0)),
    "sub2": ((30.0, 12.0, 1.5), (10.0, 4.0, 3.0), (10.0, 4.0, 2.0)),
    "json": ((6.0, 5.0, 2.5), (3.0, 3.0, 2.5), (2.5, 2.5, 2.0)),
    "story": ((3.0, 3.0, 1.0), (1.5, 1.5, 2.0), (1.5, 1.5, 2.0)),
    "call": ((0.0, 3.0, 1.0), (0.0, 6.0, 2.5), (0.0, 6.0, 2.5)),
    "calls": ((0.0, 2.5, 1.0), (0.0, 4.0, 2.0), (0.0, 4.0, 2.0)),
    "result": ((0.0, 6.0, 1.5), (0.0, 14.0, 5.0), (0.0, 12.0, 4.5)),
    "no_call": ((0.0, 3.5, 1.5), (0.0, 5.0, 2.5), (0.0, 5.0, 2.5)),
}

# Weights (plain, chat, thinking) of small talk in the third stage, and 0 before.
TALK_WEIGHTS = {
    "greeting": (0.0, 2.5, 1.0),
    "thanks": (0.0, 2.0, 0.7),
    "about": (0.0, 2.5, 1.0),
    "unknown": (0.0, 14.0, 4.0),
    "unknown_to_tools": (0.0, 3.0, 1.0),
    "loose": (0.0, 6.0, 1.5),
    "loose2": (0.0, 3.0, 0.5),
}
TALK_STAGE = 2

TAPPED = ("add2", "sub2")
"""The tasks that must stay half learnt."""

TARGET = 0.52
"""Accuracy on the tune split from which on the weight of a tapped task is multiplied by CLOSED."""
CLOSED = 0.05

OPENING = 600
"""The step before which the taps stay closed. One-digit arithmetic comes first: the other digits of
a sum build on the same table of facts."""


class Taps:
    """The weights of all kinds of examples; a tapped kind is rare while its accuracy is high."""

    def __init__(self, settings: Settings) -> None:
        """Begin with the weights of the first stage, all taps closed."""
        self.stage = 0
        self.tight = False
        kinds = kinds_of(*tasks.TASKS, *tasks.TOOL_TASKS, *tasks.TALK_TASKS)
        self.weights: dict[Kind, float] = {kind: self.weight(kind) for kind in kinds}
        # Thoughts do not teach two-digit results, so they have no tap.
        self.prompts: dict[Kind, list[Example]] = {
            (task, form): tasks.distinct(task, form, "tune", settings.tap_prompts, settings.seed)
            for task, form in kinds_of(*TAPPED)
            if form != "thinking"
        }
        for kind in self.prompts:
            self.set(kind, is_open=False)

    def weight(self, kind: Kind) -> float:
        """Return the weight of a kind in this stage with all taps open."""
        task, form = kind
        if task in WEIGHTS:
            weights = WEIGHTS[task][self.stage]
        elif self.stage == TALK_STAGE:
            weights = TALK_WEIGHTS[task]
        else:
            return 0.0
        return weights[("plain", "chat", "thinking").index(form)]

    def set(self, kind: Kind, *, is_open: bool) -> None:
        """Open or close the tap of `kind`."""
        closed = 0.0 if self.tight else CLOSED
        self.weights[kind] = self.weight(kind) * (1.0 if is_open else closed)

    def measure(self, model: Model, tokenizer: FastTokenizer) -> dict[Kind, float]:
        """Return the accuracy of each tapped kind on the tune split."""
        return {
            kind: evaluate(model, tokenizer, prompts) / len(prompts)
            for kind, prompts in self.prompts.items()
        }

    def turn(self, model: Model, tokenizer: FastTokenizer, step: int) -> str:
        """Open or close the taps by their accuracies, and return a line for the log."""
        if step < OPENING:
            return "taps closed"
        states = []
        for kind, share in self.measure(model, tokenizer).items():
            is_open = share < TARGET
            self.set(kind, is_open=is_open)
            states.append(f"{' '.join(kind)} {share:.2f}{'+' if is_open else '-'}")
        return ", ".join(states)
