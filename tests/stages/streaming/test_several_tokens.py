"""Steps that make several tokens of a sample at once, since drafted tokens were accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.parts.speculation import VerifiedDraft
from nano_inference.bus.public import Completion, CompletionChunk

from .client import Client, assert_chunks_match, cancel_of, request_of, started, tokens_of


class Row(NamedTuple):
    """A token as the executor reports it."""

    seq_id: int
    token_id: int
    reason: str


def verified(seq_id: int, num_tokens: int, num_accepted: int) -> VerifiedDraft:
    return VerifiedDraft(seq_id, "ngram", num_tokens, num_accepted)


def absorb(client: Client, rows: Sequence[tuple[int, int, str]], **fields: Any) -> None:
    """A step in which each sequence got its tokens since a draft was right but for its last one."""
    counts = Counter(row[0] for row in rows)
    drafts = tuple(verified(seq_id, number, number - 1) for seq_id, number in counts.items())
    client.step(rows, drafts=drafts, **fields)


def play(client: Client, steps: list[list[Row]], *, tops: bool) -> Completion:
    """Has the steps absorbed, and then the request ended if it goes on.

    The second sample's tokens have log S.
    """
    for rows in steps:
        pairs = [((row.token_id, -1.0), (row.token_id + 1, -2.0)) for row in rows if tops]
        supports = tuple(-1 / (1 + row.token_id) if row.seq_id == 2 else None for row in rows)
        columns = {"support_logprobs": supports}
        absorb(client, rows, top_logprobs=tuple(pairs), columns=columns)
    client.end(cancel_of())
    return client.completion()


def without_times(completion: Completion) -> Completion:
    """All of it but the times, and what was drafted."""
    replace = msgspec.structs.replace
    usage = tokens_of(completion.usage)
    usage = replace(usage, accepted_prediction_tokens=0, rejected_prediction_tokens=0)
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
    request = request_of(
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
    completions: list[Completion] = []
    streamed: list[list[CompletionChunk]] = []
    for steps in (alone, together):
        client = Client(tokenizer)
        client.step(new=[started(1, request, 0), started(2, request, 1)])
        completions.append(play(client, steps, tops=request.logprobs > 0))
        chunks = [client.chunks("r", index) for index in (0, 1)]
        if request.stream:
            assert_chunks_match(client, completions[-1])
            for of_one, sample in zip(chunks, completions[-1].samples, strict=True):
                tops = [top for chunk in of_one for top in chunk.top_logprobs or ()]
                assert tuple(tops) == (sample.top_logprobs or ())
        else:
            assert not any(chunks)
        streamed += chunks
    assert without_times(completions[0]) == without_times(completions[1])
    first, second = completions[0].samples
    assert first.support_logprobs is None
    assert second.support_logprobs == tuple(-1 / (1 + each) for each in second.token_ids)
    for chunks in streamed[2:]:
        assert len([chunk for chunk in chunks if chunk.token_ids]) <= len(together)


def test_tokens_of_one_step_are_one_chunk(client: Client) -> None:
    client.step(new=[started(1, request_of(n=2)), started(2, request_of(n=2), 1)])
    first, second = client.encode("the letters"), client.encode("one")
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
    client.step(new=[started(1, request_of(stop=(" two",)))])
    before, behind = client.encode("one"), client.encode(" two")
    rest = client.encode(" three")
    absorb(client, [(1, each, "") for each in [*before, *behind, *rest]])
    sample = client.completion().samples[0]
    assert (sample.text, sample.finish_reason) == ("one", "stop")
    assert sample.token_ids == (*before, *behind)
    assert_chunks_match(client, client.completion())
    assert client.halts == [1]


def test_draft_tokens_after_a_stop_string_are_not_counted_as_accepted(client: Client) -> None:
    client.step(new=[started(1, request_of(stop=(" two",)))])
    kept = client.encode("one two")
    lost = client.encode(" three")
    absorb(client, [(1, each, "") for each in [*kept, *lost]])
    completion = client.completion()
    usage = completion.usage
    assert usage.completion_tokens == len(kept)
    assert usage.accepted_prediction_tokens == len(kept) - 1
    assert usage.rejected_prediction_tokens == len(lost) + 1
    assert completion.samples[0].num_draft_tokens == len(kept) + len(lost)


def test_a_sequence_that_the_executor_ended_in_the_same_step_needs_no_halt(client: Client) -> None:
    client.step(new=[started(1, request_of(stop=("one",)))])
    ids = client.encode("one two")
    absorb(client, [(1, each, "") for each in ids[:-1]] + [(1, ids[-1], "length")])
    assert client.completion().samples[0].finish_reason == "stop"
    assert client.halts == []


def test_drafts_are_counted_for_samples_and_in_the_usage(client: Client) -> None:
    request = request_of(n=2)
    client.step(new=[started(1, request), started(2, request, 1)])
    for drafts in ((verified(1, 4, 2), verified(2, 3, 0)), (verified(1, 5, 5),)):
        client.step([(1, 10, ""), (2, 11, "")], drafts=drafts)
    # Also of the step with which it ends, and not of what has ended.
    drafts = (verified(2, 2, 1), verified(7, 9, 9))
    client.step([(1, 10, "length"), (2, 11, "length")], drafts=drafts)
    client.step([(8, 10, "length"), (9, 11, "length")], drafts=drafts)
    completion = client.completion()
    first, second = completion.samples
    assert (first.num_draft_tokens, first.num_accepted_draft_tokens) == (9, 7)
    assert (second.num_draft_tokens, second.num_accepted_draft_tokens) == (5, 1)
    usage = completion.usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (8, 6)
