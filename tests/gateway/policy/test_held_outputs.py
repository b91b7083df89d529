"""Nothing blocked leaves, however an answer is cut into chunks."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nano_inference.bus.public import (
    Completion,
    CompletionChunk,
    GenerateRequest,
    Output,
    TokenLogprob,
)
from nano_inference.config import SamplingParams
from nano_inference.gateway.policy.block_list import BlockList, Scanner
from nano_inference.gateway.policy.held_outputs import HeldOutputs

from ..sampled import WORDS
from .spoken import Spoken, chunks_of, end_of, heard, spoken

BLOCKED = BlockList(["bad", "ﬁsh", "İs", "ß t", "a\u0301b"], [r"e[0-9]+\.", "th.{1,4}x"], 12)
ALPHABET = "abdefhistxBADSß ﬁİıſé\u0301\u00ad\u200d\uff42가1."
TEXTS = st.text(ALPHABET, max_size=40)
# Some texts, and tokens as no text has them: parts of characters, and special ones.
ANSWERS = st.builds(
    lambda text, others: (text, others),
    TEXTS,
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 767)), max_size=4),
)
CUTS = st.lists(st.integers(0, 80), max_size=12)


def tokens_of(answer: tuple[str, list[tuple[int, int]]]) -> list[int]:
    text, others = answer
    token_ids = list(WORDS.token_ids(text, add_special=False))
    for place, token_id in others:
        token_ids.insert(place % (len(token_ids) + 1), token_id)
    return token_ids


def passed(
    request: GenerateRequest,
    outputs: Sequence[Output],
    blocked: BlockList = BLOCKED,
    before: str = "",
) -> list[Output]:
    held = HeldOutputs(request, blocked, WORDS, before)
    return [released for output in outputs for released in held.put(output)]


def request_of(**fields: Any) -> GenerateRequest:
    given: dict[str, Any] = {"request_id": "r", "prompt": "a"}
    return GenerateRequest(**given | {"sampling": SamplingParams(logprobs=1)} | fields)


def first_match(before: str, text: str) -> int | None:
    scanner = Scanner(BLOCKED, before)
    scanner.push(text)
    scanner.finish()
    return scanner.blocked_at


@given(st.lists(ANSWERS, min_size=1, max_size=3), TEXTS, CUTS, st.booleans())
@example([("ba", []), ("d", [])], "b", [1], False)
@example([("bad", [(0, 224), (1, 0)])], "", [1, 2], False)
@example([("xéİs", [(3, 86)])], "", [1, 2, 3, 4, 5, 6], True)
def test_nothing_blocked_leaves(
    answers: list[tuple[str, list[tuple[int, int]]]],
    prompt: str,
    cuts: list[int],
    stops: bool,
) -> None:
    sampling = SamplingParams(logprobs=1, stop=("badeb", "1.") if stops else ())
    request = request_of(n=len(answers), sampling=sampling)
    said = [tokens_of(answer) for answer in answers]
    outputs = spoken(request, said, cuts)
    released = passed(request, outputs, before=prompt)
    end, before = end_of(released), end_of(outputs)
    for index, (sample, was) in enumerate(zip(end.samples, before.samples, strict=True)):
        by_tokens = WORDS.text(sample.token_ids, skip_special=True)
        for text in (sample.text, by_tokens):
            assert first_match("", text) is None
        in_all = WORDS.text(was.token_ids, skip_special=True)
        found = [first_match(prompt, in_all), first_match("", was.text)]
        at = min((each for each in found if each is not None), default=None)
        if at is None:
            assert sample == was
        else:
            # All before it, and no more.
            assert sample.text == was.text[:at]
            assert in_all[:at].startswith(by_tokens)
            assert sample.finish_reason == "content_filter"
            number = len(sample.token_ids)
            assert sample.token_ids == was.token_ids[:number]
            assert sample.logprobs == sample.ref_logprobs == was.logprobs[:number]
            assert len(sample.top_logprobs or ()) == number
            assert sample.support_logprobs == was.logprobs[:number]
            assert all(first < number for _, first in sample.weight_versions)
        # The chunks contain the same.
        if was.token_ids:
            assert heard(released, index) == (sample.text, sample.token_ids)
    for chunk in released:
        if isinstance(chunk, CompletionChunk):
            assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.top_logprobs or ())
            assert chunk.support_logprobs == chunk.logprobs


@given(ANSWERS, CUTS, CUTS)
def test_the_result_does_not_depend_on_chunks(
    answer: tuple[str, list[tuple[int, int]]], cuts: list[int], others: list[int]
) -> None:
    request = request_of()
    said = [tokens_of(answer)]
    once = end_of(passed(request, spoken(request, said, cuts)))
    again = end_of(passed(request, spoken(request, said, others)))
    in_one_piece = msgspec.structs.replace(request, stream=False)
    whole = end_of(passed(in_one_piece, spoken(in_one_piece, said, [])))
    assert once == again == whole


@given(ANSWERS, CUTS, st.integers(0, 12))
@example(("1BAD", []), [], 0)
def test_text_after_a_match_changes_nothing(
    answer: tuple[str, list[tuple[int, int]]], cuts: list[int], more: int
) -> None:
    """A cancelled engine generates some more tokens."""
    request = request_of()
    said = tokens_of(answer)
    (whole,) = end_of(passed(request, spoken(request, [said], cuts))).samples
    longer = [*said, *WORDS.token_ids("x" * (20 + more))]
    (ended,) = end_of(passed(request, spoken(request, [longer], cuts))).samples
    if ended.finish_reason == "content_filter" and len(ended.text) < len(whole.text):
        return  # what came made a match of what was none before
    if whole.finish_reason == "content_filter":
        # Short answers of `spoken` have no versions.
        versions = whole.weight_versions or ended.weight_versions
        assert ended == msgspec.structs.replace(whole, weight_versions=versions)


# Pieces of JSON, and of JSON in JSON. None begins an escape that the next piece completes.
WRITTEN = ["b", "a", "d", "x" * 9, r"\u0062", r"\u0061", r"\u0041", r"\\u0061", r"\\u0064"]
WRITTEN += [r"\"", r"\\", r"\ud83d\ude00", r"\\n", "ﬁ", r"\ufb01", "sh"]


def read(text: str) -> list[str]:
    """A JSON string decoded once, and twice."""
    found = [text]
    while len(found) < 3:
        try:
            # Quotes around strings are no part of them.
            inner = re.sub(r'(?<!\\)"', "'", found[-1])
            found.append(json.loads(f'"{inner}"', strict=False))
        except ValueError:
            break
    return found


@given(st.lists(st.sampled_from(WRITTEN), min_size=1, max_size=12), CUTS)
@example([r"\u0062", "ad", "x" * 9], [1])
@example(["b", r"\\u0061", "d"], [3])
@example(["b", "a", r"\\u0064", r"\\"], [])
@example([r"\u0061", "b", "a", "d", r"\u0062", r"\u0061", "d"], range(80))
def test_blocked_text_in_escapes_does_not_leave(pieces: list[str], cuts: Sequence[int]) -> None:
    request, text = request_of(), "".join(pieces)
    said = [list(WORDS.token_ids(text, add_special=False))]
    released = passed(request, spoken(request, said, cuts))
    (sample,) = end_of(released).samples
    # A cut may leave a part of an escape, which is none.
    assert not any(map(BLOCKED.blocks, read(sample.text.rstrip("\\"))))
    assert heard(released, 0) == (sample.text, sample.token_ids)
    in_one_piece = msgspec.structs.replace(request, stream=False)
    outputs = spoken(in_one_piece, said, [])
    assert end_of(passed(in_one_piece, outputs)).samples == (sample,)
    # Valid JSON at both levels; escapes in other texts are judged as well.
    if len(read(text)) == 3 and not any(map(BLOCKED.blocks, read(text))):
        assert sample.text == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (r"so \u0062ad", "so "),
        (r"so b\u0061d", "so b"),
        (r"\u0061 so b\u0061d", r"\u0061 so "),
        (r"b\\u0061d", "b"),
        (r"so \u006", r"so \u006"),
        (r"so \ud83dbad", r"so \ud83d"),
        ("so \\", "so \\"),
    ],
)
def test_a_text_ends_before_an_escape(text: str, left: str) -> None:
    request = request_of()
    said = [WORDS.token_ids(text)]
    for cuts in ([], range(80)):
        outputs = spoken(request, said, cuts)
        assert end_of(passed(request, outputs)).samples[0].text == left


def test_allowed_outputs_are_unchanged() -> None:
    request = request_of(n=2)
    said = [list(WORDS.token_ids(text)) for text in ("a good day " * 9, "and night")]
    outputs = spoken(request, said, range(0, 60, 3))
    released = passed(request, outputs)
    for index in range(2):
        assert chunks_of(released, index) == chunks_of(outputs, index)
    assert end_of(released) == end_of(outputs)


def test_text_leaves_as_soon_as_it_is_safe() -> None:
    request, blocked = request_of(), BlockList(["0123"], [], 1)
    said = Spoken(request, 0, WORDS.token_ids("abcdefghij"))
    held, left = HeldOutputs(request, blocked, WORDS), []
    for chunk in said.chunks(range(20)):
        left += held.put(chunk)
        if chunk.finish_reason is None:
            behind = "".join(said.texts)[len(heard(left, 0)[0]) :]
            assert len(behind) - len("abcdefghij") + chunk.token_offset + 1 <= 4 + 1 + 1
    assert heard(left, 0)[0] == "abcdefghij"


def test_a_request_is_complete_when_no_sample_goes_on() -> None:
    request = request_of(n=2)
    bad, good = (
        Spoken(request, i, WORDS.token_ids(text))
        for i, text in enumerate(("bad" + "x" * 30, "good"))
    )
    held = HeldOutputs(request, BLOCKED, WORDS)
    for chunk in bad.chunks(range(40))[:-1]:
        held.put(chunk)
    assert (held.blocked, held.complete) == (1, False)
    for chunk in good.chunks([1]):
        held.put(chunk)
    assert (held.blocked, held.complete) == (1, True)
    # No cancellation is needed once it has ended by itself.
    held.put(bad.chunks(range(40))[-1])
    assert not held.complete


def test_a_blocked_token_is_no_alternative() -> None:
    """Neither in the answer nor in the prompt."""
    request = request_of(sampling=SamplingParams(logprobs=2, prompt_logprobs=2))
    blocked = BlockList(["the"], [], 1)
    (the,), (other, *_) = WORDS.token_ids(" the"), WORDS.token_ids("good")
    tops = ((TokenLogprob(token_id=other, logprob=-1.0), TokenLogprob(token_id=the, logprob=-2.0)),)
    chunk = Spoken(request, 0, [other]).chunks([])[0]
    masks: Any = {"sampling_masks": (struct.pack("<2i", the, other),)}
    chunk = msgspec.structs.replace(
        chunk, top_logprobs=tops, prompt_top_logprobs=((), *tops), **masks
    )
    whole = Spoken(request, 0, [other]).whole()
    whole = msgspec.structs.replace(whole, top_logprobs=tops, **masks)
    end = msgspec.structs.replace(
        end_of(spoken(request, [[]], [])), samples=(whole,), prompt_top_logprobs=((), *tops)
    )
    left, *_, last = passed(request, [chunk, end], blocked)
    assert isinstance(left, CompletionChunk)
    assert isinstance(last, Completion)
    assert left.top_logprobs == last.samples[0].top_logprobs == (tops[0][:1],)
    assert left.prompt_top_logprobs == last.prompt_top_logprobs == ((), tops[0][:1])
    # Without it the mask would be that of another support.
    assert left.sampling_masks == last.samples[0].sampling_masks == (b"",)


def test_a_request_ended_by_guardrails_is_done() -> None:
    request = request_of()
    said = Spoken(request, 0, WORDS.token_ids("so bad" + "x" * 30))
    held = HeldOutputs(request, BLOCKED, WORDS)
    for chunk in said.chunks(range(40)):
        held.put(chunk)
    aborted = msgspec.structs.replace(said.whole(), finish_reason="abort")
    cancelled = msgspec.structs.replace(
        end_of(spoken(request, [[]], [])), status="cancelled", samples=(aborted,)
    )
    (end,) = held.put(cancelled)
    assert (end.status, end.error) == ("done", None)
    assert (end.samples[0].text, end.samples[0].finish_reason) == ("so ", "content_filter")


def test_a_cancelled_request_stays_cancelled() -> None:
    request = request_of(n=2)
    bad = Spoken(request, 0, WORDS.token_ids("bad")).whole()
    cut = msgspec.structs.replace(
        Spoken(request, 1, WORDS.token_ids("goo")).whole(), finish_reason="abort"
    )
    end = end_of(spoken(request, [[], []], []))
    cancelled = msgspec.structs.replace(end, status="cancelled", samples=(bad, cut))
    (released,) = HeldOutputs(request, BLOCKED, WORDS).put(cancelled)
    assert released.status == "cancelled"
    assert [each.finish_reason for each in released.samples] == ["content_filter", "abort"]


def test_a_match_may_begin_before_the_answer() -> None:
    request = request_of()
    said = spoken(request, [WORDS.token_ids("ad")], [])
    end = end_of(passed(request, said, before="x" * 500 + " b"))
    assert (end.samples[0].text, end.samples[0].token_ids) == ("", ())
    # Where that is not shown, nothing is whole.
    assert end_of(passed(request, said)) == end_of(said)


def test_tokens_of_held_text_are_held() -> None:
    """A possible stop string is held by streaming, while its tokens leave."""
    request = request_of(sampling=SamplingParams(stop=("badly done",)))
    said = Spoken(request, 0, WORDS.token_ids("bad bad bad bad"))
    held = HeldOutputs(request, BlockList(["bad"], [], 1), WORDS)
    left = [released for chunk in said.chunks(range(20)) for released in held.put(chunk)]
    assert [(chunk.text, chunk.token_ids) for chunk in left] == [("", ())]


@pytest.mark.parametrize("cuts", [[], range(20)])
def test_a_text_ends_before_its_stop_string(cuts: Sequence[int]) -> None:
    """The tokens' text goes on, without a match."""
    request = request_of(sampling=SamplingParams(stop=("s of",)))
    blocked = BlockList([], [r"\bcat\b"], 256)
    said = [WORDS.token_ids("two cats of mine")]
    released = passed(request, spoken(request, said, cuts), blocked)
    assert heard(released, 0)[0] == end_of(released).samples[0].text == "two "
