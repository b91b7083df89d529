"""A sample's message and tokens don't depend on how it is cut into chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import RowFinish
from nano_inference.bus.public import CompletionChunk, CompletionSample, GenerateRequest, Output
from nano_inference.gateway.policy.block_list import BlockList
from nano_inference.gateway.policy.held_outputs import HeldOutputs
from nano_inference.gateway.serving.message_parts import MessageParts, NewParts, TokenRecord
from nano_inference.text.messages import Delta, MessageFormat, Reading

from ..fake import completion
from ..sampled import (
    CALL,
    LLAMA,
    PHRASES,
    QWEN,
    READING,
    SPECIAL,
    TOKENIZER,
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


def read(
    made: Made, chunks: list[CompletionChunk], form: MessageFormat | None, *, records: bool = True
) -> tuple[NewParts, MessageParts]:
    parts = MessageParts(WORDS, made.sampling, form, READING, "seed", by_tokens=records)
    found = NewParts([], [], [])
    for new in (*map(parts.add, chunks), parts.end(made.sample)):
        found.deltas.extend(new.deltas)
        found.records.extend(new.records)
        found.places.extend(new.places)
    return found, parts


def whole(deltas: list[Delta]) -> tuple[str, str, list[str]]:
    """Reasoning, content, and calls with their arguments."""
    calls = [
        f"{call.place} {call.id} {call.name} {call.arguments}" for d in deltas for call in d.calls
    ]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


@given(tokens, stops, ends, st.integers(0, 5), sizes, st.integers(0, 40))
def test_deltas_do_not_depend_on_chunks(
    token_ids: list[int],
    stop: tuple[str, ...],
    end: RowFinish,
    min_tokens: int,
    cuts: list[int],
    shown: int,
) -> None:
    made = make(token_ids, stop, end, min_tokens)
    for form in (None, QWEN, LLAMA):
        wanted, parts = read(made, [], form)
        for chunks in (made.chunks, made.chunks[:shown], joined(made.chunks, cuts)):
            found, again = read(made, chunks, form)
            assert found == wanted
            assert (again.calls, again.reasoning_tokens) == (parts.calls, parts.reasoning_tokens)


@given(tokens, stops, ends, st.integers(0, 5))
def test_records_are_the_sample_s_tokens_and_text(
    token_ids: list[int], stop: tuple[str, ...], end: RowFinish, min_tokens: int
) -> None:
    made = make(token_ids, stop, end, min_tokens)
    sample = made.sample
    found, _ = read(made, [], None)
    assert tuple(each.token_id for each in found.records) == sample.token_ids
    assert tuple(each.logprob for each in found.records) == sample.logprobs
    assert [each.version for each in found.records] == [
        3 + place // 4 for place in range(len(sample.token_ids))
    ]
    assert "".join(each.text for each in found.records) == sample.text
    assert whole(found.deltas) == ("", sample.text, [])
    plain, _ = read(made, made.chunks, None, records=False)
    assert whole(plain.deltas) == whole(found.deltas)
    assert plain.records == [each._replace(text="") for each in found.records]


@given(tokens, stops, ends)
def test_a_record_leaves_once_its_text_is_certain(
    token_ids: list[int], stop: tuple[str, ...], end: RowFinish
) -> None:
    made = make(token_ids, stop, end)
    parts = MessageParts(WORDS, made.sampling, None, None, "seed")
    certain, records = "", list[TokenRecord]()
    for taken, chunk in enumerate(made.chunks[:-1], 1):
        records += parts.add(chunk).records
        certain += chunk.text
        assert len(records) == known(token_ids[:taken], len(certain))
        assert certain.startswith("".join(each.text for each in records))


def known(token_ids: list[int], chars: int) -> int:
    """The number of tokens whose text lies within so many characters."""
    detokenizer = WORDS.detokenizer(skip_special=True)
    found, waiting, shown = 0, 0, ""
    for place, token_id in enumerate(token_ids, 1):
        text = detokenizer.push([token_id])
        # The characters before this text are complete.
        found += waiting if text else 0
        waiting = 0 if text else waiting
        shown += text
        if len(shown) > chars:
            return found
        waiting += 1
        if WORDS.text(token_ids[:place], skip_special=True) == shown:
            found, waiting = found + waiting, 0
    return found


def held(made: Made, literal: str) -> tuple[list[CompletionChunk], CompletionSample]:
    """The outputs that a guardrail lets through."""
    request = GenerateRequest(request_id="r")
    guarded = HeldOutputs(request, BlockList([literal], [], 1), WORDS)
    outputs: list[Output] = [*made.chunks, completion(request, made.sample)]
    *chunks, last = (each for output in outputs for each in guarded.put(output))
    return [each for each in chunks if isinstance(each, CompletionChunk)], last.samples[0]


def test_guardrails_judge_escapes_in_arguments() -> None:
    """A call's arguments are shown without escapes. A cut call is text."""
    made = make(ids(CALL.replace("é", r"fj\u006frd")), (), "stop")
    chunks, sample = held(made, "fjord")
    assert sample.finish_reason == "content_filter"
    for shown in (chunks, []):
        found, parts = read(made._replace(sample=sample), shown, QWEN)
        assert whole(found.deltas) == ("", CALL.partition("é")[0] + "fj", [])
        assert parts.malformed == 0


@given(tokens, ends, st.sampled_from(["ST", "rüß", "漢", " b", "name", "call>"]))
def test_guardrails_cut_chunks_and_samples_alike(
    token_ids: list[int], end: RowFinish, literal: str
) -> None:
    made = make(token_ids, (), end)
    chunks, sample = held(made, literal)
    made = made._replace(sample=sample)
    for form in (None, QWEN, LLAMA):
        found, _ = read(made, chunks, form)
        assert found == read(made, [], form)[0]
        assert tuple(each.token_id for each in found.records) == sample.token_ids
        if form is None:
            assert whole(found.deltas) == ("", sample.text, [])


@given(st.lists(st.sampled_from(PHRASES).map(ids), max_size=6), ends)
def test_special_tokens_are_not_shown(parts: list[list[int]], end: RowFinish) -> None:
    made = make([each for part in parts for each in part] or [5], (), end)
    message = MessageParts(WORDS, made.sampling, QWEN, Reading(), "seed")
    reasoning, content, _ = whole(message.end(made.sample).deltas)
    for name in SPECIAL:
        assert name not in reasoning + content


def test_a_malformed_call_is_shown_as_written() -> None:
    text = f"a<tool_call>{SPECIAL[3]}</tool_call>b"
    found, parts = read(make(ids(text), (), "stop"), [], QWEN)
    assert (whole(found.deltas)[1], parts.malformed) == (text, 1)
    # A call that is cut off is no malformed call.
    text = text[:20]
    found, parts = read(make(ids(text)), [], QWEN)
    assert (whole(found.deltas)[1], parts.malformed) == (text, 0)


def test_a_special_token_s_name_in_ordinary_tokens_is_text() -> None:
    spelled = [*ids("<|im_"), *ids("start|>")]
    assert not {*spelled} & {*ids("".join(SPECIAL))}
    assert content_of(make(spelled)) == "<|im_start|>"


def test_the_stop_token_is_no_part_of_the_message() -> None:
    made = make(ids("98"), end="stop")
    found, _ = read(made, made.chunks, QWEN)
    assert whole(found.deltas) == ("", "98", [])
    assert [each.text for each in found.records][-2:] == ["8", ""]
    # Also where it follows a part of a character.
    made = make(ids("漢")[:1], end="stop")
    assert content_of(made) == made.sample.text == "\ufffd"
    assert [each.text for each in read(made, [], QWEN)[0].records] == ["\ufffd", ""]


def test_a_stop_string_cuts_within_a_token() -> None:
    (token_id,) = (each for each in range(len(TOKENIZER)) if WORDS.token(each) == " the")
    made = make([*ids("a"), token_id, *ids("b")], ("he",))
    found, _ = read(made, made.chunks, None)
    assert [each.text for each in found.records] == ["a", " t"]
    assert found.records == read(made, [], None)[0].records


def with_special_marks() -> MessageFormat:
    """One whose calls stand between special tokens."""
    fields = QWEN.response_template["fields"]
    marks = {"open_pattern": r"<\|im_start\|>", "close_pattern": r"<\|pad\|>"}
    fields = fields | {"tool_calls": fields["tool_calls"] | marks}
    template = QWEN.response_template | {"fields": fields}
    return MessageFormat(name="special", response_template=template)


def test_a_special_token_that_is_a_mark_is_read() -> None:
    text = '<|endoftext|>a<|im_start|>{"name": "add", "arguments": {}}<|pad|>'
    found, parts = read(make(ids(text)), [], with_special_marks())
    _, content, calls = whole(found.deltas)
    assert (content, parts.calls) == ("a", 1)
    assert calls[0].endswith(" add {}")


def test_marks_within_a_stop_string_are_ignored() -> None:
    made = make([*ids("aST"), *ids("<|im_start|>"), *ids("OP")], ("STOP",))
    found, parts = read(made, made.chunks, with_special_marks())
    assert (whole(found.deltas)[1], parts.malformed) == ("a", 0)
    assert [each.text for each in found.records] == ["a", *[""] * (len(found.records) - 1)]


def content_of(made: Made) -> str:
    return whole(read(made, made.chunks, QWEN)[0].deltas)[1]
