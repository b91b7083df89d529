"""The text that a chat template writes after an answer: for prompts that go on by tokens.

A template may write an earlier answer differently than the model did: without its reasoning, with
other white space in a call, or as other tokens. Only what comes after the answer is needed, and it
is found without reading the template: the conversation is rendered twice, the second time with
another text in the answer. Both texts end alike, from a place within the answer on, and the first
stop token there is the answer's own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from .conversation import Turn, text_of

OTHER = "[another answer]"
"""Text and argument by which the second conversation's answer differs."""


def last_answer(turns: Sequence[Turn]) -> int | None:
    """Return the place of the assistant's last message, if only messages of others follow it."""
    places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    return places[-1] if places and 0 < places[-1] < len(turns) - 1 else None


def with_other_answer(turns: Sequence[Turn], place: int) -> list[Turn]:
    """Return a conversation in which one answer has another text, and its last call another
    argument."""
    answer = dict(turns[place])
    answer["content"] = text_of(answer) + OTHER
    if calls := answer.get("tool_calls"):
        function = dict(calls[-1]["function"])
        function["arguments"] = {**function["arguments"], OTHER: OTHER}
        answer["tool_calls"] = [*calls[:-1], {**calls[-1], "function": function}]
    return [*turns[:place], answer, *turns[place + 1 :]]


def text_after(
    text: str, other: str, later: Sequence[Turn], stops: Collection[str], ended_by: str
) -> str | None:
    """Return what follows an answer in a rendered conversation; None if that is not certain.

    Args:
        text: The conversation, rendered.
        other: The same with another answer.
        later: The messages after the answer.
        stops: Texts of the model's stop tokens.
        ended_by: The stop token that the model wrote; "" if it wrote none. Then the template's own
            is part of what follows.
    """
    if text == other:
        return None
    end = _common_end(text, other)
    places = {place: stop for stop in stops if (place := end.find(stop)) >= 0}
    if not places:
        return None
    first = min(places)
    if ended_by and places[first] != ended_by:
        return None
    found = end[first + len(ended_by) :]
    # A template without a stop token after answers would have one only after a later message.
    if any(own in end and own not in found for own in (text_of(turn).strip() for turn in later)):
        return None
    return found


def agrees(
    turn: Turn, contents: Collection[str], reasoning: str, calls: Sequence[tuple[str, Any]]
) -> bool:
    """Return whether a message of a conversation is what a model wrote.

    Args:
        turn: The message. It may lack the reasoning.
        contents: Its content in each form in which a client may have it.
        reasoning: The reasoning that the model wrote.
        calls: Name and arguments of each call that it wrote.
    """
    own = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in turn.get("tool_calls") or ()
    ]
    thought = str(turn.get("reasoning_content") or "").strip()
    return (
        own == list(calls)
        and text_of(turn).strip() in {each.strip() for each in contents}
        and thought in ("", reasoning.strip())
    )


def _common_end(text: str, other: str) -> str:
    """Return the longest end that two texts share, by halving."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text.endswith(other[len(other) - middle :]):
            low = middle
        else:
            high = middle - 1
    return text[len(text) - low :]
