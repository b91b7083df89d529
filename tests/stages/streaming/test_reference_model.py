"""With a reference model, a request is complete when that model has scored its samples."""

from __future__ import annotations

from typing import Any

from nano_inference.bus.control import SampleScored, ScoreSample
from nano_inference.bus.messages import RequestOpened
from nano_inference.bus.parts.scoring import PromptLogprobs
from nano_inference.bus.recovery import RecoveryItem
from nano_inference.stages.streaming.deliveries import Deliveries

from .client import Client, cancel_of, request_of, started

PROMPT = (50, 51, 52)


def scored(**changes: Any) -> RequestOpened:
    return request_of(prompt_token_ids=PROMPT, ref_temperature=0.5, **changes)


def score(client: Client, *logprobs: float, index: int = 0, entry: str = "entry-r") -> Deliveries:
    client.now_ns += 10
    return client.read(client.core.handle(SampleScored("r", entry, index, logprobs), client.now_ns))


def test_a_completion_waits_for_the_scores_of_all_samples(client: Client) -> None:
    request = scored(n=2)
    client.step(new=[started(1, request), started(2, request, 1)])
    asked = client.step([(1, 40, ""), (2, 41, "stop")]).to_score
    assert asked == [ScoreSample("r", "entry-r", 1, (*PROMPT, 41), 3, 0.5)]
    assert not score(client, -1.5, index=1).ended, "the other sample goes on"
    asked = client.step([(1, 42, "length")]).to_score
    assert asked == [ScoreSample("r", "entry-r", 0, (*PROMPT, 40, 42), 3, 0.5)]
    assert [chunk.finish_reason for chunk in client.chunks()] == [None, "length"], "not delayed"
    assert not client.completions()
    ended_ns = client.now_ns
    (ended,) = score(client, -2.5, -3.5).ended
    assert ended.last_token_ns == ended_ns < ended.completion.timings.finished_ns
    (completion,) = client.completions()
    assert [each.ref_logprobs for each in completion.samples] == [(-2.5, -3.5), (-1.5,)]
    assert completion.prompt_ref_logprobs is None
    assert not score(client, -2.5, -3.5).ended


def test_a_prompt_is_scored_with_the_first_sample(client: Client) -> None:
    request = scored(n=2, prompt_logprobs=0)
    news = [started(1, request), started(2, request, 1)]
    prompt = (PromptLogprobs(1, 1, (-1.0, -2.0)),)
    rows = [(1, 40, "stop"), (2, 41, "stop")]
    asked = client.step(rows, new=news, prompt_logprobs=prompt).to_score
    assert [each.start for each in asked] == [1, 3]
    score(client, -0.25, -0.5, -0.75)
    score(client, -4.0, index=1)
    (completion,) = client.completions()
    assert completion.prompt_ref_logprobs == (None, -0.25, -0.5)
    assert [each.ref_logprobs for each in completion.samples] == [(-0.75,), (-4.0,)]


def test_empty_scores_complete_the_request(client: Client) -> None:
    client.step([(1, 40, "stop")], new=[started(1, scored(prompt_logprobs=0))])
    score(client)
    (completion,) = client.completions()
    assert completion.status == "done"
    assert completion.samples[0].ref_logprobs is None
    assert completion.prompt_ref_logprobs is None


def test_a_request_can_be_ended_while_it_waits_for_a_score(client: Client) -> None:
    client.step([(1, 40, "stop")], new=[started(1, scored())])
    client.end(cancel_of())
    (completion,) = client.completions()
    assert (completion.status, completion.samples[0].finish_reason) == ("cancelled", "stop")
    assert completion.samples[0].ref_logprobs is None
    assert not score(client, -1.0).ended


def test_a_score_of_another_entry_is_not_taken(client: Client) -> None:
    client.step([(1, 40, "stop")], new=[started(1, scored())])
    assert not score(client, -1.0, entry="another").ended
    assert score(client, -2.0).ended


def test_missing_scores_are_requested_again_in_a_new_epoch(client: Client) -> None:
    request = scored(n=2)
    item = RecoveryItem("r", request.entry_id, "r")
    client.step([(1, 40, "stop")], new=[started(1, request), started(2, request, 1)])
    asked = client.step([(2, 41, "stop")]).to_score
    score(client, -1.0)
    client.core.reset()
    assert client.core.unanswered(item) == asked, "the other is scored"
    assert all(each.finished for each in client.core.recovered(item).samples)
    score(client, -2.0, index=1)
    (completion,) = client.completions()
    assert [each.ref_logprobs for each in completion.samples] == [(-1.0,), (-2.0,)]
    assert client.core.unanswered(item) == []
