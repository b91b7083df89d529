"""Reports beside the text: likeliest tokens, prompts, weight versions, min_tokens."""

from __future__ import annotations

import struct

import pytest

from nano_inference.bus.messages import TopLogprobs
from nano_inference.bus.parts.experts import PromptExperts
from nano_inference.bus.parts.scoring import PromptLogprobs, TargetLogprobs
from nano_inference.bus.public import CompletionSample, TokenLogprob

from .client import PROMPT, Client, Started, cancel_of, request_of, started


def top(*token_ids: int) -> TopLogprobs:
    return tuple((token_id, -token_id / 8) for token_id in token_ids)


def shown(*token_ids: int) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=i, logprob=-i / 8) for i in token_ids)


def only_sample(client: Client) -> CompletionSample:
    (sample,) = client.completion().samples
    return sample


# --- the likeliest tokens ---------------------------------------------------------------------


def test_the_likeliest_tokens_come_in_chunks_and_samples(client: Client) -> None:
    wants, other = request_of("wants", logprobs=2), request_of("other")
    news = [started(1, wants), started(2, other)]
    client.step([(2, 40, ""), (1, 41, "")], new=news, top_logprobs=((), top(41, 42)))
    client.step([(1, 43, "length"), (2, 40, "")], top_logprobs=(top(44, 43), ()))
    client.step([(2, 40, "length")])
    assert [chunk.top_logprobs for chunk in client.chunks("wants")] == [
        (shown(41, 42),),
        (shown(44, 43),),
    ]
    assert [chunk.top_logprobs for chunk in client.chunks("other")] == [None] * 3
    done, plain = client.completion("wants"), client.completion("other")
    assert done.samples[0].top_logprobs == (shown(41, 42), shown(44, 43))
    assert plain.samples[0].top_logprobs is None


# --- prompts ----------------------------------------------------------------------------------


def test_the_completion_has_the_prompt(client: Client) -> None:
    client.step([(1, 40, "stop")], new=[started(1, request_of(prompt_token_ids=(5, 6)))])
    assert client.completion().prompt_token_ids == (5, 6)


def test_a_request_that_never_ran_has_no_prompt(client: Client) -> None:
    client.end(cancel_of(unstarted=True))
    assert client.completion().prompt_token_ids == ()


def prompt_of(count: int | None, *, size: int = 5, n: int = 1) -> Started:
    return started(1, request_of(prompt_logprobs=count, prompt_token_ids=PROMPT[:size], n=n))


def found(start: int, stop: int, *, count: int = 1, seq_id: int = 1) -> PromptLogprobs:
    places = range(start, stop)
    tops = tuple(top(*range(i, i + count)) for i in places) if count else ()
    return PromptLogprobs(seq_id, start, tuple(-float(i) for i in places), tops)


@pytest.mark.parametrize("count", [0, 2])
def test_a_prompt_in_pieces(client: Client, count: int) -> None:
    client.step(new=[prompt_of(count)], prompt_logprobs=(found(1, 3, count=count),))
    client.step(prompt_logprobs=(found(3, 4, count=count),))
    client.step([(1, 40, "length")], prompt_logprobs=(found(4, 5, count=count),))
    completion = client.completion()
    assert completion.prompt_logprobs == (None, -1.0, -2.0, -3.0, -4.0)
    tops = ((), *(shown(i, i + 1) for i in range(1, 5)))
    assert completion.prompt_top_logprobs == (tops if count else None)


def test_prompt_logprobs_repeated_after_a_preemption_count_once(client: Client) -> None:
    start = prompt_of(1)
    client.step(new=[start], prompt_logprobs=(found(1, 4),))
    client.step(new=[start], prompt_logprobs=(found(1, 3),))
    client.step(prompt_logprobs=(found(3, 5),))
    # Once it has sampled, it may come again with all of it or any part.
    client.step([(1, 40, "")], new=[start])
    client.step([(1, 40, "length")], prompt_logprobs=(found(2, 5),))
    assert client.completion().prompt_logprobs == (None, -1.0, -2.0, -3.0, -4.0)
    assert client.completion().prompt_top_logprobs == ((), *(shown(i) for i in range(1, 5)))


def test_logprobs_of_a_prompt_may_begin_later(client: Client) -> None:
    request = request_of(
        prompt_logprobs=1, prompt_token_ids=PROMPT[:5], prompt_logprob_start=2, num_targets=None
    )
    client.step([(1, 40, "length")], new=[started(1, request)], prompt_logprobs=(found(3, 5),))
    completion = client.completion()
    assert completion.prompt_logprobs == (None, None, None, -3.0, -4.0)
    assert completion.prompt_top_logprobs == ((), (), (), shown(3), shown(4))


def targets(first: int, *logprobs: float) -> TargetLogprobs:
    return TargetLogprobs(1, first, struct.pack(f"<{len(logprobs)}f", *logprobs))


def test_logprobs_of_targets_are_joined_and_repeated_ones_count_once(client: Client) -> None:
    start = started(1, request_of(num_targets=5, n=2))
    client.step(new=[start], targets=targets(0, -1, -2, -3))
    client.step(new=[start], targets=targets(0, -1, -2))
    client.step(targets=targets(2, -3, -4, -5))
    client.step([(1, 40, "length")], new=[started(2, start.request, 1)])
    client.step([(2, 40, "length")])
    found = client.completion().prompt_token_id_logprobs
    assert struct.unpack("<5f", found or b"") == (-1, -2, -3, -4, -5)
    assert client.chunks()[0].prompt_token_id_logprobs == found


def test_targets_that_were_cut_short_are_not_reported(client: Client) -> None:
    client.step(new=[started(1, request_of(num_targets=5))], targets=targets(0, -1, -2, -3))
    client.end(cancel_of())
    assert client.completion().prompt_token_id_logprobs is None


def test_routed_experts_of_a_prompt_are_joined_and_repeated_ones_count_once(
    client: Client,
) -> None:
    def part(first: int, end: int, *, ended: bool = False) -> tuple[PromptExperts, ...]:
        data = b"".join(bytes([place, 0, place, 1]) for place in range(first, end))
        return (PromptExperts(1, first, 1, 2, data, ended),)

    start = started(1, request_of())
    client.step(new=[start], experts=part(2, 4))
    client.step(new=[start], experts=part(2, 3))
    client.step([(1, 40, "length")], experts=part(3, 6, ended=True))
    found = client.completion().prompt_routed_experts
    assert found is not None
    assert (found.first, found.layers, found.top_k) == (2, 1, 2)
    assert found.data == part(2, 6)[0].data
    assert client.chunks()[0].prompt_routed_experts == found


def test_no_targets_have_no_logprobs(client: Client) -> None:
    client.step([(1, 40, "length")], new=[started(1, request_of(num_targets=0))])
    assert client.completion().prompt_token_id_logprobs == b""


@pytest.mark.parametrize(("count", "tops"), [(0, None), (3, ((),))])
def test_a_prompt_of_one_token(client: Client, count: int, tops: object) -> None:
    client.step([(1, 40, "length")], new=[prompt_of(count, size=1)])
    assert client.completion().prompt_logprobs == (None,)
    assert client.completion().prompt_top_logprobs == tops


def test_prompt_logprobs_are_off_by_default(client: Client) -> None:
    client.step([(1, 40, "length")], new=[prompt_of(None)])
    assert client.completion().prompt_logprobs is None
    assert client.completion().prompt_top_logprobs is None


def test_a_prompt_that_was_cut_short_is_not_reported(client: Client) -> None:
    client.step(new=[prompt_of(1)], prompt_logprobs=(found(1, 4),))
    client.end(cancel_of())
    assert client.completion().prompt_logprobs is None


def test_siblings_share_the_prompts_logprobs(client: Client) -> None:
    start = prompt_of(0, n=2)
    client.step([(1, 40, "length")], new=[start], prompt_logprobs=(found(1, 5, count=0),))
    client.step([(2, 40, "length")], new=[started(2, start.request, 1)])
    assert client.completion().prompt_logprobs == (None, -1.0, -2.0, -3.0, -4.0)
    assert len(client.completion().samples) == 2


def test_prompt_logprobs_of_an_ended_request_are_dropped(client: Client) -> None:
    client.step(new=[prompt_of(0)], prompt_logprobs=(found(1, 3, count=0),))
    client.end(cancel_of())
    client.step(prompt_logprobs=(found(3, 5, count=0),))
    assert len(client.completions()) == 1


# --- weight versions --------------------------------------------------------------------------


def test_weight_versions_are_spans(client: Client) -> None:
    versions = [3, 3, 4, 4, 4, 6]
    client.step(new=[started(1, request_of())], weight_version=2)
    for number, version in enumerate(versions):
        last = "length" if number == len(versions) - 1 else ""
        client.step([(1, 40, last)], weight_version=version)
    sample = only_sample(client)
    assert sample.weight_versions == ((3, 0), (4, 2), (6, 5))
    assert sample.weight_version == 3
    assert [chunk.weight_version for chunk in client.chunks()] == versions


def test_a_sample_without_tokens_has_no_weight_version(client: Client) -> None:
    client.step(new=[started(1, request_of())], weight_version=2)
    client.end(cancel_of())
    assert only_sample(client).weight_versions == ()
    assert only_sample(client).weight_version == 0


# --- min_tokens -------------------------------------------------------------------------------


def test_stop_strings_are_not_looked_for_before_min_tokens(client: Client) -> None:
    text = " the lazy dog and the lazy dog"
    first = list(client.encode(" the lazy dog"))
    client.step(new=[started(1, request_of(stop=("lazy",), min_tokens=len(first)))])
    client.say(1, text)
    sample = only_sample(client)
    assert sample.text == " the lazy dog and the "
    assert sample.finish_reason == "stop"
    assert client.halts == [1]


def test_text_before_min_tokens_starts_no_stop_string(client: Client) -> None:
    """The first token of the stop string's text is one of the first, so it does not count."""
    ids = list(client.encode("fox fox"))
    cut = next(
        n for n in range(1, len(ids)) if client.backend.decode(ids[:n]) in ("f", "fo", "fox")
    )
    begin = client.backend.decode(ids[:cut])
    stop = "fox fox"
    assert begin
    assert stop.startswith(begin)
    for least, expected in ((cut, ("fox fox", "length")), (0, ("", "stop"))):
        request_id = f"r{least}"
        client.step(
            new=[started(10 + least, request_of(request_id, stop=(stop,), min_tokens=least))]
        )
        client.say(10 + least, "fox fox", "length")
        (completion,) = client.completions(request_id)
        (sample,) = completion.samples
        assert (sample.text, sample.finish_reason) == expected


def test_with_min_tokens_all_text_is_delivered_once(client: Client) -> None:
    client.step(new=[started(1, request_of(stop=("never",), min_tokens=3))])
    client.say(1, " the quick brown fox n", "length")
    assert only_sample(client).text == " the quick brown fox n"
    assert "".join(chunk.text for chunk in client.chunks()) == " the quick brown fox n"
