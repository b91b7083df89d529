"""Steps that make several tokens of a sample at once, since drafted tokens were accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.messages import RecoveryItem, StepResult, VerifiedDraft
from nano_inference.bus.public import Completion, CompletionChunk

from .test_core import Client, assert_chunks_match, cancel_of, info_of, started, step


class Row(NamedTuple):
    """A token as the executor reports it."""

    seq_id: int
    token_id: int
    reason: str


@pytest.fixture
def client(tokenizer: PreTrainedTokenizerFast) -> Client:
    return Client(tokenizer)


def verified(seq_id: int, num_tokens: int, num_accepted: int) -> VerifiedDraft:
    return VerifiedDraft(seq_id, "ngram", num_tokens, num_accepted)


def drafted(rows: Sequence[tuple[int, int, str]], **fields: int) -> StepResult:
    """A step in which each sequence got its tokens since a draft was right but for its last one."""
    counts = Counter(row[0] for row in rows)
    drafts = tuple(verified(seq_id, number, number - 1) for seq_id, number in counts.items())
    return msgspec.structs.replace(step(rows, **fields), drafts=drafts)


def absorb(client: Client, rows: Sequence[tuple[int, int, str]], **fields: int) -> None:
    """Has the client's core take such a step."""
    client.now_ns += 10
    client.read(client.core.absorb(drafted(rows, **fields), client.now_ns))


def play(client: Client, steps: list[list[Row]], *, tops: bool) -> Completion:
    """Has the steps absorbed, and then the request ended if it goes on."""
    for rows in steps:
        result = drafted(rows)
        if tops:
            top_logprobs = tuple(((row.token_id, -1.0), (row.token_id + 1, -2.0)) for row in rows)
            result = msgspec.structs.replace(result, top_logprobs=top_logprobs)
        client.now_ns += 10
        client.read(client.core.absorb(result, client.now_ns))
    client.end(cancel_of())
    return client.completion()


def what_it_says(completion: Completion) -> Completion:
    """All of it but the times, and what was drafted."""
    replace = msgspec.structs.replace
    usage = replace(completion.usage, accepted_prediction_tokens=0, rejected_prediction_tokens=0)
    samples = [
        replace(sample, num_draft_tokens=0, num_accepted_draft_tokens=0)
        for sample in completion.samples
    ]
    timings = type(completion.timings)()
    return replace(completion, timings=timings, usage=usage, samples=tuple(samples))


@given(data=st.data())
def test_any_grouping_of_tokens_into_steps_gives_the_same(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    """Two samples, with or without stop strings, likeliest tokens, and a reason of the executor's
    for the end of each; streamed and whole."""
    info = info_of(
        n=2,
        stop=data.draw(st.sampled_from([(), ("o",), ("th", "e "), ("é",)])),
        min_tokens=data.draw(st.integers(0, 4)),
        logprobs=data.draw(st.sampled_from([0, 2])),
        stream=data.draw(st.booleans()),
    )
    tokens = st.lists(st.integers(0, 425), min_size=1, max_size=12)
    of_sample: list[list[Row]] = []
    for seq_id in (1, 2):
        ids = data.draw(tokens)
        reason = data.draw(st.sampled_from(["", "stop", "length"]))
        of_sample.append([Row(seq_id, each, "") for each in ids[:-1]])
        of_sample[-1].append(Row(seq_id, ids[-1], reason))
    alone = [[row] for rows in of_sample for row in rows]
    together: list[list[Row]] = []
    left = [list(rows) for rows in of_sample]
    while any(left):
        together.append([])
        for rows in left:
            number = data.draw(st.integers(1, 5))
            together[-1] += rows[:number]
            del rows[:number]
    told: list[Completion] = []
    streamed: list[list[CompletionChunk]] = []
    for steps in (alone, together):
        client = Client(tokenizer)
        client.step(new=[started(1, info, 0), started(2, info, 1)])
        told.append(play(client, steps, tops=info.logprobs > 0))
        chunks = [client.chunks("r", index) for index in (0, 1)]
        if info.stream:
            assert_chunks_match(client, told[-1])
            for of_one, sample in zip(chunks, told[-1].samples, strict=True):
                tops = [top for chunk in of_one for top in chunk.top_logprobs or ()]
                assert tuple(tops) == (sample.top_logprobs or ())
        streamed += chunks
    assert what_it_says(told[0]) == what_it_says(told[1])
    for chunks in streamed[2:]:
        assert len([chunk for chunk in chunks if chunk.token_ids]) <= len(together)


def test_tokens_of_one_step_are_one_chunk(client: Client) -> None:
    client.step(new=[started(1, info_of(n=2)), started(2, info_of(n=2), 1)])
    first, second = client.encode("the letters").ids, client.encode("one").ids
    rows = [(1, each, "") for each in first] + [(2, each, "") for each in second]
    client.step([(1, first[0], ""), (2, second[0], "")])
    absorb(client, [*rows[:-1], (2, second[-1], "length")], weight_version=3)
    _, chunk = client.chunks()
    assert chunk.token_ids == tuple(first)
    assert chunk.token_offset == 1
    assert chunk.text == "the letters"
    assert (chunk.finish_reason, chunk.weight_version) == (None, 3)
    assert client.chunks("r", 1)[-1].finish_reason == "length"


def test_a_stop_string_in_the_middle_ends_the_sample_there(client: Client) -> None:
    client.step(new=[started(1, info_of(stop=(" two",)))])
    before, behind = client.encode("one").ids, client.encode(" two").ids
    rest = client.encode(" three").ids
    absorb(client, [(1, each, "") for each in [*before, *behind, *rest]])
    sample = client.completion().samples[0]
    assert (sample.text, sample.finish_reason) == ("one", "stop")
    assert sample.token_ids == (*before, *behind)
    assert_chunks_match(client, client.completion())
    assert client.halts == [1]


def test_what_was_accepted_behind_a_stop_string_is_not_counted_as_accepted(client: Client) -> None:
    client.step(new=[started(1, info_of(stop=(" two",)))])
    kept = client.encode("one two").ids
    lost = client.encode(" three").ids
    result = drafted([(1, each, "") for each in [*kept, *lost]])
    client.read(client.core.absorb(result, 1))
    completion = client.completion()
    usage = completion.usage
    assert usage.completion_tokens == len(kept)
    assert usage.accepted_prediction_tokens == len(kept) - 1
    assert usage.rejected_prediction_tokens == len(lost) + 1
    assert completion.samples[0].num_draft_tokens == len(kept) + len(lost)


def test_a_sequence_that_the_executor_ended_in_the_same_step_needs_no_halt(client: Client) -> None:
    client.step(new=[started(1, info_of(stop=("one",)))])
    ids = client.encode("one two").ids
    absorb(client, [(1, each, "") for each in ids[:-1]] + [(1, ids[-1], "length")])
    assert client.completion().samples[0].finish_reason == "stop"
    assert client.halts == []


def test_drafts_are_counted_for_samples_and_in_the_usage(client: Client) -> None:
    info = info_of(n=2)
    client.step(new=[started(1, info), started(2, info, 1)])
    for drafts in ((verified(1, 4, 2), verified(2, 3, 0)), (verified(1, 5, 5),)):
        result = step([(1, 10, ""), (2, 11, "")])
        client.read(client.core.absorb(msgspec.structs.replace(result, drafts=drafts), 1))
    last = step([(1, 10, "length"), (2, 11, "length")])
    # Also of the step with which it ends, and not of what has ended.
    last = msgspec.structs.replace(last, drafts=(verified(2, 2, 1), verified(7, 9, 9)))
    client.read(client.core.absorb(last, 1))
    client.read(client.core.absorb(msgspec.structs.replace(last, seq_ids=(8, 9)), 1))
    completion = client.completion()
    first, second = completion.samples
    assert (first.num_draft_tokens, first.num_accepted_draft_tokens) == (9, 7)
    assert (second.num_draft_tokens, second.num_accepted_draft_tokens) == (5, 1)
    usage = completion.usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (8, 6)


def test_a_successor_goes_on_behind_chunks_of_several_tokens(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Text, versions and logprobs are as if nobody had died; drafts are counted from there on."""
    info = info_of(stop=(" two",), adapter="a")
    ids = tokenizer.backend_tokenizer.encode("one or the tw").ids

    def result_of(part: list[int], *, adapter: int) -> StepResult:
        rows = step([(1, each, "") for each in part])
        versions = (adapter,) * len(part)
        drafts = (verified(1, 3, len(part) - 1),)
        return msgspec.structs.replace(rows, adapter_versions=versions, drafts=drafts)

    before = Client(tokenizer)
    before.step(new=[started(1, info)])
    before.read(before.core.absorb(result_of(ids[:3], adapter=2), 1))
    successor = Client(tokenizer)
    successor.core.restore(info, before.chunks())
    recovered = successor.core.recovered(RecoveryItem("r", info.entry_id, info))
    assert recovered.samples[0].token_ids == tuple(ids[:3])
    successor.step(new=[started(1, info, num_generated=3)])
    successor.read(successor.core.absorb(result_of(ids[3:], adapter=3), 2))
    successor.end(cancel_of())
    sample = successor.completion().samples[0]
    assert sample.text == "one or the tw"
    assert sample.token_ids == tuple(ids)
    assert sample.adapter_version == 2
    assert sample.num_draft_tokens == 3
    texts = [chunk.text for chunk in before.chunks() + successor.chunks()]
    assert "".join(texts) == sample.text
