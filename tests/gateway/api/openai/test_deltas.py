"""Messages of chats: the same streamed, resumed anywhere, and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import anyio
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import RowFinish
from nano_inference.bus.public import CompletionChunk, GenerateRequest
from nano_inference.config import Config
from nano_inference.gateway.api.openai.answers import Choice, ChoicesWriter, fitting, message_of
from nano_inference.gateway.api.openai.positions import FINISHED, UNBEGUN
from nano_inference.gateway.api.openai.requests import (
    ChoicesCall,
    ChoicesRecord,
    read_chat,
    read_completion,
)
from nano_inference.gateway.api.openai.streams import Chunks
from nano_inference.gateway.call import Account
from nano_inference.gateway.serving.begun_calls import decode_record
from nano_inference.telemetry.instruments import REASONING_TOKENS, TOOL_CALLS
from nano_inference.text.messages import Delta, MessageFormat, ToolCall

from ...fake import completion
from ...recorded import Recorded
from ...sampled import (
    BARE_CALL,
    CALL,
    LLAMA,
    QWEN,
    READING,
    SPECIAL,
    WORDS,
    Made,
    ends,
    ids,
    joined,
    make,
    sizes,
    stops,
    tokens,
)
from .streamed import choices

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "stream": True}
LISTED: dict[str, Any] = {"logprobs": True, "return_token_ids": True}


class Sent(NamedTuple):
    """An event: the choice in it, and where the stream was after it."""

    choice: dict[str, Any]
    position: int


def chat(made: Made, **fields: Any) -> ChoicesCall:
    """A call of a chat whose messages are read."""
    body = {key: value for key, value in fields.items() if key not in ChoicesCall.__struct_fields__}
    body |= {key: fields[key] for key in ("logprobs", "n") if key in fields}
    call, _ = read_chat(HELLO | body, Config(), 1000)
    changed = {key: value for key, value in fields.items() if key not in body}
    given = {"reading": READING, "sampling": made.sampling} | changed
    return msgspec.structs.replace(call, **given)


def answers(
    call: ChoicesCall, told: Recorded | None = None, form: MessageFormat = QWEN
) -> ChoicesWriter:
    return ChoicesWriter(call, [(5, 6)], [None], WORDS, form, told.measures if told else None)


def whole(
    made: Made, call: ChoicesCall, told: Recorded | None = None, form: MessageFormat = QWEN
) -> dict[str, Any]:
    ended = completion(GenerateRequest(), made.sample)
    (choice,) = answers(call, told, form).whole([ended])["choices"]
    return dict(choice)


def stream(
    made: Made,
    call: ChoicesCall,
    chunks: Sequence[CompletionChunk],
    reads: list[bool],
    after: int = UNBEGUN,
    form: MessageFormat = QWEN,
) -> list[Sent]:
    """The events, when the client reads, or does not, after each chunk."""
    choice = Choice(answers(call, form=form), 0, 0, after)
    sent: list[Sent] = []

    def send() -> None:
        if not choice.begun and call.chat:
            sent.append(Sent(choice.role(), choice.sent))
        while choice.due:
            sent.append(Sent(choice.take(), choice.sent))

    for number, chunk in enumerate(chunks):
        choice.add(chunk)
        if reads[number % len(reads)]:
            send()
    choice.end(made.sample, completion(GenerateRequest(), made.sample))
    send()
    return sent


def told_by(sent: Sequence[Sent]) -> dict[str, Any]:
    """Return a client's result of some events."""
    told: dict[str, Any] = {"roles": 0, "parts": [], "tokens": [], "logprobs": [], "reasons": []}
    for choice, _ in sent:
        told["roles"] += "role" in choice["delta"]
        told["tokens"] += choice.get("token_ids", [])
        told["logprobs"] += (choice["logprobs"] or {}).get("content", [])
        told["reasons"] += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
        for name in ("reasoning_content", "content"):
            if text := choice["delta"].get(name):
                if told["parts"] and told["parts"][-1][0] == name:
                    text = told["parts"].pop()[1] + text
                told["parts"].append((name, text))
        told["parts"] += [("call", call) for call in choice["delta"].get("tool_calls", [])]
    return told


def message_told(told: dict[str, Any]) -> dict[str, Any]:
    """The same as a message in one piece."""
    found: dict[str, Any] = {"role": "assistant", "refusal": None}
    for name in ("content", "reasoning_content"):
        found[name] = "".join(part for kind, part in told["parts"] if kind == name)
    calls = [dict(part) for kind, part in told["parts"] if kind == "call"]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    found["tool_calls"] = calls
    if calls and not found["content"]:
        found["content"] = None
    return {key: value for key, value in found.items() if value != "" and value != []} | {
        "content": found["content"]
    }


@given(
    tokens,
    stops,
    ends,
    sizes,
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([QWEN, LLAMA]),
)
def test_the_same_streamed_resumed_anywhere_and_whole(
    token_ids: list[int],
    stop: tuple[str, ...],
    end: RowFinish,
    cuts: list[int],
    reads: list[bool],
    listed: bool,
    form: MessageFormat,
) -> None:
    made = make(token_ids, stop, end)
    call = chat(made, **(LISTED if listed else {}))
    wanted = whole(made, call, form=form)
    sent = stream(made, call, made.chunks, reads, form=form)
    told = told_by(sent)
    told_whole = dict.fromkeys(wanted["message"]) | message_told(told)
    assert told_whole == wanted["message"]
    assert told["reasons"] == [wanted["finish_reason"]]
    if listed:
        assert told["tokens"] == list(made.sample.token_ids)
        assert told["logprobs"] == wanted["logprobs"]["content"]
    for number, event in enumerate(sent, 1):
        for chunks in (made.chunks, joined(made.chunks, cuts), ()):
            rest = stream(made, call, chunks, reads[::-1], event.position, form)
            assert told_by([*sent[:number], *rest]) == told
    assert sent[-1].position == FINISHED


@given(tokens, ends)
def test_parts_keep_their_order(token_ids: list[int], end: RowFinish) -> None:
    """Whether or not much comes at once."""
    made = make(token_ids, (), end)
    call = chat(made)
    one_by_one = told_by(stream(made, call, made.chunks, [True]))
    assert told_by(stream(made, call, [], [True])) == one_by_one


PIECES = st.builds(
    Delta,
    st.sampled_from(["", "r"]),
    st.sampled_from(["", "c"]),
    st.sampled_from([(), (ToolCall(0, "i", "f", "{}"),)]),
)


@given(st.lists(PIECES.filter(any), max_size=8))
def test_a_chunk_holds_deltas_in_order(deltas: list[Delta]) -> None:
    def kinds(of: Sequence[Delta]) -> list[str]:
        return [kind for delta in of for kind, part in zip("rct", delta, strict=True) if part]

    left, chunks = deltas, 0
    while left:
        number = fitting(left)
        assert kinds(left[:number]) == sorted(kinds(left[:number]), key="rct".index)
        assert list(message_of(left[:number], "r", whole=False)) == [
            {"r": "r", "c": "content", "t": "tool_calls"}[kind]
            for kind in dict.fromkeys(kinds(left[:number]))
        ]
        left, chunks = left[number:], chunks + 1
    assert chunks <= len(deltas)


def test_finish_reasons() -> None:
    """ "tool_calls" where there is one, and the model has ended by itself."""
    for text, end, reason in [
        (CALL, "stop", "tool_calls"),
        (CALL + "and", "length", "length"),
        ("none", "stop", "stop"),
    ]:
        made = make(ids(text), (), "stop" if end == "stop" else "length")
        assert whole(made, chat(made))["finish_reason"] == reason
        assert told_by(stream(made, chat(made), made.chunks, [True]))["reasons"] == [reason]


THOUGHT = "<think>\nso\n</think>\n\n"


def test_a_message_with_calls_alone_has_no_content() -> None:
    made = make(ids(THOUGHT + CALL + CALL), (), "stop")
    message = whole(made, chat(made))["message"]
    first, second = message.pop("tool_calls")
    assert message == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "so",
    }
    assert first["id"] != second["id"]
    assert first["type"] == "function"
    assert first["function"]["name"] == "add"
    assert json.loads(first["function"]["arguments"]) == {"a": "é"}


@pytest.mark.parametrize("listed", [{}, LISTED])
def test_the_reasoning_field_is_configurable_or_left_out(listed: dict[str, Any]) -> None:
    made = make(ids(THOUGHT + "98"), (), "stop")
    for field, include in (("reasoning", True), ("reasoning_content", False)):
        call = chat(made, reasoning_field=field, include_reasoning=include, **listed)
        wanted = {"role": "assistant", "content": "98", "refusal": None}
        assert whole(made, call)["message"] == wanted | ({field: "so"} if include else {})
        sent = stream(made, call, made.chunks, [True])
        names = {name for event in sent for name in event.choice["delta"]}
        assert names == {"role", "content"} | ({field} if include else set())
        # What is not shown brings no events either.
        assert listed or all(event.choice["delta"] or event.position == FINISHED for event in sent)


@pytest.mark.parametrize(("text", "form"), [(CALL, QWEN), (BARE_CALL, LLAMA)])
def test_the_reason_follows_a_call_in_a_chunk_of_its_own(text: str, form: MessageFormat) -> None:
    """Only then OpenAI's library takes the last call for complete."""
    made = make(ids(text), (), "stop")
    call = chat(made)
    *_, called, last = stream(made, call, made.chunks, [True], form=form)
    assert len(called.choice["delta"].pop("tool_calls")) == 1
    assert (called.choice["delta"], called.choice["finish_reason"]) == ({}, None)
    assert (last.choice["delta"], last.choice["finish_reason"]) == ({}, "tool_calls")
    assert stream(made, call, made.chunks, [True], called.position, form) == [last]


def test_content_after_calls_comes_after_them() -> None:
    made = make(ids(f"a{CALL}b"), (), "stop")
    told = told_by(stream(made, chat(made), [], [True]))
    assert [kind for kind, _ in told["parts"]] == ["content", "call", "content"]


def test_special_tokens_are_listed_and_not_shown() -> None:
    made = make(ids(f"a{SPECIAL[1]}b"), (), "stop")
    choice = whole(made, chat(made, **LISTED))
    assert choice["message"]["content"] == "ab"
    assert list(choice["token_ids"]) == ids(f"a{SPECIAL[1]}b<|im_end|>")
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


@given(tokens, stops, sizes, st.lists(st.booleans(), min_size=1, max_size=5))
def test_texts_and_their_tokens_stay_together_under_stop_strings(
    token_ids: list[int], stop: tuple[str, ...], cuts: list[int], reads: list[bool]
) -> None:
    """vLLM 31135: at each place of a stream the tokens that were told are those of the text."""
    made = make([each for each in token_ids if each >= len(SPECIAL)] or [5], stop)
    body = {"prompt": "a", "logprobs": 0, "stream": True, "return_tokens_as_token_ids": True}
    call, _ = read_completion(body, Config())
    call = msgspec.structs.replace(call, sampling=made.sampling)
    text, told = "", list[int]()
    sent = stream(made, call, joined(made.chunks, cuts), reads)
    for choice, position in sent:
        text += choice["text"]
        names = (choice["logprobs"] or {"tokens": []})["tokens"]
        told += [int(name.removeprefix("token_id:")) for name in names]
        if position != FINISHED:
            assert WORDS.detokenizer(skip_special=True).push(told) == text
    assert text == made.sample.text
    # The stop string is that of the last tokens.
    assert WORDS.text(told, skip_special=True).startswith(text)


def test_a_message_is_counted_once() -> None:
    made = make(ids(THOUGHT + CALL + "98"), (), "stop")
    told = Recorded()
    whole(made, chat(made), told)
    counted = told.values(TOOL_CALLS), told.values(REASONING_TOKENS)
    assert counted[0] == {("made",): 1, ("malformed",): 0}
    assert counted[1][()] > 0
    # One that was sent to its end before is not counted again.
    for after, times in ((FINISHED, 1), (UNBEGUN, 2)):
        choice = Choice(answers(chat(made), told), 0, 0, after)
        choice.end(made.sample, completion(GenerateRequest(), made.sample))
        assert told.values(TOOL_CALLS)[("made",)] == times


@pytest.mark.parametrize("continuous", [False, True])
async def test_usage_counts_reasoning_of_all_choices(continuous: bool) -> None:
    made = make(ids(THOUGHT + "98"), (), "stop")
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    call = chat(made, n=2, stream_options=options)
    sent: list[dict[str, Any]] = []

    async def send(data: bytes, event_id: str = "") -> None:
        sent.append(json.loads(data))

    samples = [msgspec.structs.replace(made.sample, sample_index=index) for index in range(2)]
    ended = completion(GenerateRequest(n=2), *samples)
    chunks = Chunks(answers(call), send)
    async with anyio.create_task_group() as group:
        group.start_soon(chunks.send_all)
        for chunk in made.chunks:
            for index in range(2):
                chunks.put(0, msgspec.structs.replace(chunk, sample_index=index))
            await anyio.wait_all_tasks_blocked()
        chunks.put(0, ended)
        chunks.close()
    await chunks.send_usage([ended], Account())
    wanted = answers(call).whole([ended])["usage"]
    assert wanted["completion_tokens_details"]["reasoning_tokens"] > 0
    assert sent[-1]["usage"] == wanted
    for index in range(2):
        deltas = [each["delta"] for each in choices(sent, index)]
        assert "".join(delta.get("content", "") for delta in deltas) == "98"
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "so"
    if continuous:
        counts = [each["usage"]["completion_tokens_details"]["reasoning_tokens"] for each in sent]
        assert counts == sorted(counts)


def test_how_a_message_is_read_is_kept_with_its_call() -> None:
    made = make(ids("98"), (), "stop")
    call = chat(made)
    record = ChoicesRecord(tenant="t", call=call, prompts=[(5,)], texts=[None], has_prompts=True)
    assert decode_record(record.encode(), ChoicesRecord) == record
