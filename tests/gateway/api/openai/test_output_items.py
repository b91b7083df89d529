"""The items of a response: the same, and told alike, however the engine's outputs are cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import RowFinish
from nano_inference.bus.public import CompletionChunk
from nano_inference.gateway.api.openai.responses.items import items_of, turns_of
from nano_inference.gateway.api.openai.responses.output import ItemEvent, OutputItems
from nano_inference.gateway.serving.logprobs import TokenNames
from nano_inference.gateway.serving.message_parts import MessageParts
from nano_inference.text.messages import MessageFormat

from ...sampled import (
    QWEN,
    READING,
    WORDS,
    Made,
    ends,
    joined,
    make,
    sizes,
    stops,
    tokens,
)

NAMES = TokenNames(WORDS, as_ids=False)


def read(
    made: Made, chunks: Iterable[CompletionChunk], form: MessageFormat | None, *, logprobs: bool
) -> tuple[list[ItemEvent], list[dict[str, Any]]]:
    """What is told of a sample, and what stands there at its end."""
    parts = MessageParts(WORDS, made.sampling, form, READING, "seed", by_tokens=logprobs)
    items = OutputItems("1", parts, NAMES if logprobs else None)
    events = [event for chunk in chunks for event in items.add([chunk])]
    return events + items.end(made.sample), items.blocks


def of(events: list[ItemEvent], kind: str) -> list[dict[str, Any]]:
    return [each.fields for each in events if each.type == f"response.{kind}"]


@given(tokens, stops, ends, sizes, st.booleans(), st.sampled_from([None, QWEN]))
def test_the_events_add_up_to_the_items(
    token_ids: list[int],
    stop: tuple[str, ...],
    end: RowFinish,
    cuts: list[int],
    logprobs: bool,
    form: MessageFormat | None,
) -> None:
    made = make(token_ids, stop, end)
    _, wanted = read(made, [], form, logprobs=logprobs)
    assert wanted
    for chunks in ([], made.chunks, joined(made.chunks, cuts)):
        events, items = read(made, chunks, form, logprobs=logprobs)
        assert items == wanted
        assert [each["item"] for each in of(events, "output_item.done")] == items
        begun = [each["item"]["id"] for each in of(events, "output_item.added")]
        assert begun == [item["id"] for item in items]
        assert len({*begun}) == len(begun)
        for place, item in enumerate(items):
            own = [each for each in events if each.fields["output_index"] == place]
            assert own[0].type == "response.output_item.added"
            assert own[-1].type == "response.output_item.done"
            deltas = [each.fields for each in own if each.type.endswith(".delta")]
            parts = item.get("content", [{"text": item.get("arguments")}])
            assert "".join(each["delta"] for each in deltas) == parts[0]["text"]
            shown = [entry for each in deltas for entry in each.get("logprobs", [])]
            assert shown == parts[0].get("logprobs", [])


@given(tokens, stops, ends)
def test_logprobs_are_of_tokens_of_the_text(
    token_ids: list[int], stop: tuple[str, ...], end: RowFinish
) -> None:
    """In order, none twice; of a message that is not taken apart, all of them."""
    made = make(token_ids, stop, end)
    told = list(zip(map(NAMES.name, made.sample.token_ids), made.sample.logprobs, strict=True))
    for form in (None, QWEN):
        _, items = read(made, [], form, logprobs=True)
        parts = [item["content"][0] for item in items if item["type"] == "message"]
        shown = [(e["token"], e["logprob"]) for part in parts for e in part["logprobs"]]
        rest = iter(told)
        assert all(each in rest for each in shown)
        if form is None:
            assert shown == told


# --- items of a conversation ----------------------------------------------------------------------

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
