"""A model that answers any number of turns, and a check that clients send back all that it wrote.

Each turn is a person's question, a thought with a text and a tool call, the tool's result, and a
thought with an answer. A prompt must begin with the prompt before it and what the model wrote, so
that nothing of the history is lost, and all of it is found in the prefix cache.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise

from nano_inference.bus.public import GenerateRequest, Output
from nano_inference.config import Config

from .fake import FakeEngine
from .saying import saying, words_of

TURNS = 10
TOOL = "look"
_THOUGHT = re.compile(r"<think>\n.*?\n</think>\n\n", re.S)
_BEGIN = "<|im_start|>"


def question(turn: int) -> str:
    return f"How is it in place {turn}?"


def result(place: str) -> str:
    """What the client's tool returns."""
    return f"cold in {place}."


class HistoryEngine(FakeEngine):
    """Answers by the prompt's last turn.

    Attributes:
        written: The prompt of each request, and what the model wrote.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(self._answer)
        self._words = words_of(config)
        self.written: list[tuple[str, str]] = []

    def _answer(self, request: GenerateRequest) -> list[Output]:
        token_ids = request.prompt_token_ids or ()
        prompt = self._words.text(token_ids, skip_special=False)
        text = _next_text(prompt)
        self.written.append((prompt, text))
        return saying(text, self._words, 3, "stop")(request)


def _next_text(prompt: str) -> str:
    turns = prompt.split(_BEGIN)
    turn, after_result = (
        sum(each.startswith("user") for each in turns),
        turns[-2].startswith("tool"),
    )
    begun = prompt.endswith("<think>\n")
    thought = f"Turn {turn}{', seen' if after_result else ''}.\n</think>\n\n"
    said = f"It is cold there, {turn}." if after_result else _call(turn)
    return ("" if begun else "<think>\n") + thought + said


def _call(turn: int) -> str:
    body = json.dumps({"name": TOOL, "arguments": {"place": str(turn), "days": [1, {"a": None}]}})
    return f"Let me look, {turn}.\n<tool_call>\n{body}\n</tool_call>"


def check_histories(
    written: list[tuple[str, str]], turns: int = TURNS, *, thoughts: bool = True
) -> None:
    """Check the requests of one conversation.

    Args:
        thoughts: Whether the client sends back the model's reasoning.
    """
    assert len(written) == 2 * turns
    for (before, text), (prompt, _) in pairwise(written):
        wanted = f"{before}{text}<|im_end|>\n"
        if not thoughts:
            wanted, prompt = (_THOUGHT.sub("", each) for each in (wanted, prompt))
        assert prompt.startswith(wanted), (wanted[-400:], prompt[len(wanted) - 400 :])
    last = written[-1][0]
    for turn in range(1, turns + 1):
        assert last.count(question(turn)) == last.count(result(str(turn))) == 1
