"""Items of a conversation become turns, whatever their order: nothing is lost, and nothing said
twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.gateway.api.openai.responses.items import items_of, turns_of

KINDS = ("user", "assistant", "reasoning", "function_call", "function_call_output")


def item(kind: str, text: str) -> dict[str, Any]:
    """One that says this text."""
    if kind == "reasoning":
        return {"type": kind, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
    if kind == "function_call":
        return {"type": kind, "call_id": "a", "name": text, "arguments": "{}"}
    if kind == "function_call_output":
        return {"type": kind, "call_id": "b", "output": text}
    return {"role": kind, "content": text}


def said(turn: dict[str, Any]) -> list[str]:
    """The texts of a turn, in the order in which a template writes them."""
    calls = [each["function"]["name"] for each in turn.get("tool_calls", [])]
    return [*turn.get("reasoning_content", "").split("\n"), turn["content"], *calls]


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12))
def test_every_item_is_said_once_and_in_order(kinds: list[str]) -> None:
    turns = turns_of(items_of([item(kind, f"t{place}") for place, kind in enumerate(kinds)]))
    told = [text for turn in turns for text in said(turn) if text]
    assert told == [f"t{place}" for place in range(len(kinds))]
    roles = {"user": "user", "function_call_output": "tool"}
    others = [roles[kind] for kind in kinds if kind in roles]
    assert [turn["role"] for turn in turns if turn["role"] != "assistant"] == others
    # Two turns of the assistant follow each other only where one could not have been written so.
    for turn, following in pairwise(turns):
        if turn["role"] == following["role"] == "assistant":
            assert turn["content"] or "tool_calls" in turn
            assert following["content"] or "reasoning_content" in following
