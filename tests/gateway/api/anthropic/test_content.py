"""A message is the same told in events as it is whole, however it comes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_inference.bus.messages import RowFinish
from nano_inference.bus.public import CompletionChunk, GenerateRequest
from nano_inference.config import SamplingParams
from nano_inference.gateway.api.anthropic.answers import ContentBlocks, MessageWriter
from nano_inference.gateway.serving.message_parts import MessageParts, NewParts
from nano_inference.text.messages import Delta, Reading, Tool, ToolCall

from ...fake import completion
from ...sampled import QWEN, WORDS, ids, joined, make
from .calling import call

BIG = call("add", '{"a": 123456789012345678901234567890, "b": 1e400, "c": "é\\u00e9"}')
PIECES = st.sampled_from(
    [
        "<think>\n",
        "\n</think>\n\n",
        "Hm. ",
        call("add", '{"a": 1}'),
        BIG,
        "<tool_call>",
        "STOP",
        "\n",
    ]
)
READINGS = st.sampled_from(
    [
        None,
        Reading(tools=(Tool(name="add"),)),
        Reading(tools=(Tool(name="add"),), opening="<think>\n"),
        Reading(tools=(Tool(name="add"),), separates_reasoning=False),
        Reading(),
    ]
)


class Client:
    """Puts together what it is told, and holds it against the rules of a stream."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.names: list[str] = []
        self._open: dict[str, Any] | None = None
        self._input = ""

    def take(self, told: Any) -> None:
        event = json.loads(msgspec.json.encode(told))
        name = event["type"]
        self.names.append(name)
        if name == "message_start":
            assert not self.message
            self.message = event["message"]
        elif name == "content_block_start":
            assert self._open is None
            assert event["index"] == len(self.message["content"])
            self._open, self._input = event["content_block"], ""
            self.message["content"].append(self._open)
        elif name == "content_block_delta":
            assert event["index"] == len(self.message["content"]) - 1
            self._grow(event["delta"])
        elif name == "content_block_stop":
            if self._open["type"] == "tool_use":
                self._open["input"] = json.loads(self._input)
            self._open = None
        elif name == "message_delta":
            assert self._open is None
            self.message |= event["delta"] | {"usage": event["usage"]}

    def _grow(self, delta: dict[str, Any]) -> None:
        kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"}
        assert self._open["type"] == kinds.get(delta["type"], "tool_use")
        if delta["type"] == "input_json_delta":
            self._input += delta["partial_json"]
            return
        if delta["type"] == "signature_delta":
            self._open["signature"] += delta["signature"]
            return
        kind = kinds[delta["type"]]
        assert delta[kind]
        self._open[kind] += delta[kind]


def answers_of(request: GenerateRequest, reading: Reading | None, *, shows: bool) -> MessageWriter:
    parts = MessageParts(WORDS, request.sampling, QWEN, reading, "seed", by_tokens=False)
    thinks = reading is not None and reading.separates_reasoning
    return MessageWriter(
        request, "tiny", WORDS, parts, counts_thinking=thinks, shows_thinking=shows
    )


@settings(deadline=None)
@given(
    st.lists(PIECES, max_size=6),
    READINGS,
    st.sampled_from([(), ("STOP",)]),
    st.sampled_from(["length", "stop", "abort"]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(0, 60),
    st.booleans(),
)
def test_the_same_however_it_comes(
    texts: list[str],
    reading: Reading | None,
    stop: tuple[str, ...],
    end: RowFinish,
    cuts: list[int],
    batches: list[int],
    told: int,
    shows: bool,
) -> None:
    token_ids = ids("".join(texts)) or [5]
    chunks, sample, sampling = make(token_ids, stop, end)
    request = GenerateRequest(request_id="msg_1", prompt_token_ids=(1, 2), sampling=sampling)
    done = completion(request, sample)
    whole = json.loads(msgspec.json.encode(answers_of(request, reading, shows=shows).whole(done)))

    client, answers = Client(), answers_of(request, reading, shows=shows)
    # What the chunks do not tell comes with the end.
    left: list[CompletionChunk] = joined(chunks, cuts)[:told]
    place = 0
    while left:
        size = batches[place % len(batches)]
        for event in answers.add(left[:size]):
            client.take(event)
        left, place = left[size:], place + 1
    for event in answers.end(done):
        client.take(event)
    assert client.message == whole
    assert (client.names[0], client.names[-1]) == ("message_start", "message_stop")
    assert client.names.count("ping") == 1

    kinds = [block["type"] for block in whole["content"]]
    assert kinds
    assert all(block.get("text") != "" for block in whole["content"]) or kinds == ["text"]
    calls = kinds.count("tool_use")
    assert (whole["stop_reason"] == "tool_use") == (
        calls > 0 and sample.finish_reason == "stop" and whole["stop_sequence"] is None
    )
    if reading is None or not reading.tools:
        assert not calls
    if not shows:
        assert not any(block.get("thinking") for block in whole["content"])


def test_one_event_has_all_that_came_of_a_block() -> None:
    class Read(MessageParts):
        def add(self, chunk: CompletionChunk) -> NewParts:
            return NewParts(deltas, [], [0] * len(deltas))

    blocks = ContentBlocks(
        Read(None, SamplingParams(), None, None, "seed", by_tokens=False), "a", shows_thinking=True
    )
    one, two = (ToolCall(place, f"call_{place}", "add", "{}") for place in range(2))
    deltas = [
        Delta(reasoning="a"),
        Delta(reasoning="b", content="c"),
        Delta(content="d", calls=(one,)),
        Delta(calls=(two,)),
        Delta(content="e"),
    ]
    told = [
        each["delta"] for each in blocks.add(make([5], (), "stop").chunks[:1]) if "delta" in each
    ]
    assert [each["type"] for each in told] == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "input_json_delta",
        "input_json_delta",
        "text_delta",
    ]
    assert (told[0]["thinking"], told[2]["text"], told[5]["text"]) == ("ab", "cd", "e")
    blocks.end(None)
    assert [each["type"] for each in blocks.blocks] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
        "text",
    ]
