from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import RequestOpened
from nano_inference.bus.parts.sessions import SessionGrant
from nano_inference.bus.public import Completion, ErrorInfo, Usage
from nano_inference.bus.recovery import RecoveryItem
from nano_inference.bus.steps import StepResult
from nano_inference.stages.streaming.deliveries import Deliveries
from nano_inference.stages.streaming.parts.handover import StepsAhead

from .client import (
    TRACE,
    Client,
    Started,
    assert_chunks_match,
    cancel_of,
    request_of,
    started,
    step,
    tokens_of,
)


def test_a_streamed_request_from_start_to_end(client: Client) -> None:
    client.step(new=[started(5, request_of(), num_cached=4)], end_ns=180)
    assert client.outputs == []
    ids = client.encode(" lazy dog 🙂")
    for n, token_id in enumerate(ids):
        last = n == len(ids) - 1
        deliveries = client.step([(5, token_id, "length" if last else "")], end_ns=200 + n)
        assert len(deliveries.ended) == last
    completion = client.completion()
    assert completion.status == "done"
    assert completion.error is None
    assert (completion.model, completion.entry_id) == ("tiny", "entry-r")
    (sample,) = completion.samples
    assert sample.text == " lazy dog 🙂"
    assert sample.token_ids == tuple(ids)
    assert sample.logprobs == tuple(-float(i) for i in ids)
    assert sample.finish_reason == "length"
    usage = Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=len(ids))
    assert tokens_of(completion.usage) == usage
    assert completion.trace_id == TRACE
    assert_chunks_match(client, completion)
    assert client.halts == []
    assert len(client.core) == 0


@pytest.mark.parametrize(
    ("grant", "result"),
    [
        (SessionGrant("pin", 2, 4), ("accepted", 8, "device", "")),
        (SessionGrant("pin", 1, 4, reason="full"), ("clipped", 4, "device", "full")),
        (SessionGrant("pin", 0, 4, reason="full"), ("rejected", 0, "", "full")),
        (SessionGrant("release", 0, 4), ("accepted", 0, "", "")),
        (SessionGrant("demote", 0, 4), ("accepted", 8, "device", "")),
        (SessionGrant("demote", 0, 4, tiers=True), ("accepted", 8, "host", "")),
        (SessionGrant("demote", 0, 4, reason="bad"), ("rejected", 0, "", "bad")),
        (SessionGrant("pin", 0, 16, reason=""), ("accepted", 0, "", "")),
    ],
)
def test_a_turn_is_answered_by_its_grant_and_its_length(
    client: Client, grant: SessionGrant, result: tuple[object, ...]
) -> None:
    """11 tokens in all, of which the last has no KV. A preemption grants nothing new."""
    request = request_of()
    ids = client.encode("a b c d")[:4]
    client.step([(5, ids[0], "")], new=[started(5, request, parts=(grant,))])
    client.step([(5, ids[1], "")], new=[started(5, request, num_generated=1)])
    for token_id in ids[2:]:
        client.step([(5, token_id, "length" if token_id == ids[-1] else "")])
    found = client.completion().kv_session
    assert found is not None
    assert (found.outcome, found.num_tokens, found.tier, found.reason) == result


def test_a_request_failed_by_the_executor_ends_and_halts_its_samples(client: Client) -> None:
    """Its row, which has to have some token and some end, does not count."""
    request, other = request_of(n=2), request_of("q")
    new = [started(5, request), started(6, request, 1), started(7, other)]
    (a,) = client.encode("a")
    client.step([(5, a, ""), (6, a, ""), (7, a, "")], new=new)
    failure = cancel_of(status="error", code="invalid_constraint")
    client.step([(5, a, "length"), (6, a, ""), (7, a, "")], failed=[failure, failure])
    completion = client.completion()
    assert (completion.status, completion.error and completion.error.code) == (
        "error",
        "invalid_constraint",
    )
    assert [sample.token_ids for sample in completion.samples] == [(a,), (a,)]
    assert client.halts == [5, 6]
    client.step([(6, a, ""), (7, a, "stop")])
    assert client.completion("q").status == "done"


def test_timings_follow_the_request_through_the_stages(client: Client) -> None:
    client.step(new=[started(5, request_of())], end_ns=180)
    client.step([(5, 40, "")], end_ns=200)  # at 1020
    client.step([(5, 40, "length")], end_ns=300)  # at 1030
    timings = client.completion().timings
    assert (timings.received_ns, timings.first_token_ns, timings.finished_ns) == (100, 1020, 1030)
    assert [(time.stage, time.start_ns, time.end_ns) for time in timings.stages] == [
        ("admission", 100, 110),
        ("fairness", 110, 150),
        ("batching", 150, 160),
        ("executor", 160, 300),
        ("streaming", 200, 1030),
    ]


def test_timings_without_a_token_or_a_time_in_fairness(client: Client) -> None:
    client.step(new=[started(5, request_of(), queued=None)], ended=[cancel_of()], end_ns=180)
    timings = client.completion().timings
    assert timings.first_token_ns == 0
    assert [(time.stage, time.start_ns, time.end_ns) for time in timings.stages] == [
        ("admission", 100, 110),
        ("batching", 110, 160),
        ("executor", 160, 180),
    ]


def test_a_request_that_is_not_traced_has_no_trace_id(client: Client) -> None:
    client.step([(5, 40, "length")], new=[started(5, request_of(traceparent=""))])
    assert client.completion().trace_id == ""


def test_samples_may_start_and_finish_at_different_times(client: Client) -> None:
    request = request_of(n=3)
    first = started(10, request, 0, executed_ns=150)
    client.step(new=[started(12, request, 2, num_cached=1), first])
    client.say(12, " dog", "length")
    client.say(10, " fox", "length")
    assert client.completions() == []
    client.step(new=[started(11, request, 1, num_cached=6)], end_ns=900)
    ids = client.say(11, " cat", "length", end_ns=950)
    completion = client.completion()
    assert [(s.sample_index, s.text) for s in completion.samples] == [
        (0, " fox"),
        (1, " cat"),
        (2, " dog"),
    ]
    assert completion.usage.cached_tokens == 7
    assert completion.usage.completion_tokens == sum(len(s.token_ids) for s in completion.samples)
    assert len(completion.samples[1].token_ids) == len(ids)
    executor = next(time for time in completion.timings.stages if time.stage == "executor")
    assert (executor.start_ns, executor.end_ns) == (150, 950)
    assert_chunks_match(client, completion)


def test_a_stop_string_ends_a_sample_and_halts_its_sequence(client: Client) -> None:
    client.step(new=[started(5, request_of(stop=("lazy",)))])
    ids = client.encode(" the lazy dog")
    for token_id in ids:
        client.step([(5, token_id, "")])
    completion = client.completion()
    (sample,) = completion.samples
    assert sample.text == " the "
    assert sample.finish_reason == "stop"
    # Up to the token that completed it, and not one more.
    decode = client.backend.decode
    assert "lazy" in decode(list(sample.token_ids))
    assert "lazy" not in decode(list(sample.token_ids[:-1]))
    assert client.halts == [5]
    assert_chunks_match(client, completion)


@pytest.mark.parametrize("stop_token", ["</s>", "T"])
def test_the_text_of_a_stop_token_is_not_shown(client: Client, stop_token: str) -> None:
    token_id = client.backend.token_to_id(stop_token)
    client.step(new=[started(5, request_of(stop=("dogT",)))])
    ids = client.say(5, " dog")
    client.step([(5, token_id, "stop")])
    completion = client.completion()
    (sample,) = completion.samples
    assert (sample.text, sample.finish_reason) == (" dog", "stop")
    assert sample.token_ids == (*ids, token_id)
    assert_chunks_match(client, completion)


def test_an_incomplete_character_ends_as_a_replacement(client: Client) -> None:
    ids = client.encode("🙃")
    assert len(ids) > 1
    client.step(new=[started(5, request_of())])
    for token_id in ids[:-2]:
        client.step([(5, token_id, "")])
    client.step([(5, ids[-2], "length")])
    completion = client.completion()
    assert completion.samples[0].text == "\ufffd"
    assert_chunks_match(client, completion)


def test_a_preempted_sequence_goes_on_where_it_was(client: Client) -> None:
    request = request_of(n=2)
    client.step(new=[started(5, request, 0, num_cached=4), started(6, request, 1)])
    ids = client.encode(" the 🙂 fox")
    for n, token_id in enumerate(ids):
        new = [started(5, request, 0, num_cached=n, num_generated=n, executed_ns=900)] if n else []
        client.step([(5, token_id, "length" if n == len(ids) - 1 else "")], new=new)
    client.step([(6, 40, "length")])
    completion = client.completion()
    assert completion.samples[0].text == " the 🙂 fox"
    assert completion.usage.cached_tokens == 4
    assert completion.timings.stages[3].start_ns == 160
    assert_chunks_match(client, completion)


@pytest.mark.parametrize("n", [1, 2])
def test_a_sequence_preempted_while_its_halt_is_on_the_way_stays_ended(
    client: Client, n: int
) -> None:
    request = request_of(n=n, stop=("fox",))
    client.step(new=[started(5 + i, request, i) for i in range(n)])
    ids = client.say(5, " fox")
    client.step([(5, 40, "")], new=[started(5, request, 0, num_generated=len(ids) + 1)])
    client.step([(5, 40, "length")])
    assert client.halts == [5]
    assert len(client.core) == n - 1
    if n == 2:
        client.step([(6, 40, "length")])
    assert client.completion().samples[0].token_ids == tuple(ids)


def test_a_cancellation_in_a_step_applies_after_its_tokens(client: Client) -> None:
    request = request_of(n=3, stop=("fox trot",))
    client.step([(6, 40, "length")], new=[started(5, request, 0), started(6, request, 1)])
    ids = client.say(5, " the fox")
    last = client.encode(" tr")[0]
    client.step([(5, last, "")], ended=[cancel_of(status="expired", code="expired")])
    completion = client.completion()
    assert completion.status == "expired"
    assert completion.error == ErrorInfo(code="expired", message="you asked for it")
    assert [(s.sample_index, s.finish_reason) for s in completion.samples] == [
        (0, "abort"),
        (1, "length"),
    ]
    assert completion.samples[0].token_ids == (*ids, last)
    assert completion.samples[0].text.startswith(" the fox")
    assert completion.usage.completion_tokens == len(ids) + 2
    assert_chunks_match(client, completion)
    assert len(client.core) == 0
    seen = len(client.outputs)
    client.step([(5, 40, "length")])
    assert len(client.outputs) == seen


def test_an_incomplete_character_is_shown_on_abort_too(client: Client) -> None:
    client.step([(5, client.encode("🙃")[0], "")], new=[started(5, request_of())])
    client.end(cancel_of())
    assert client.completion().samples[0].text == "\ufffd"


@pytest.mark.parametrize(
    ("cancel", "key"),
    [
        (cancel_of("x", code="unknown_model", status="error"), "x"),
        (cancel_of("", entry_id="e", code="malformed", status="error"), "e"),
        (cancel_of("x", entry_id="e", code="duplicate_request", status="error"), "e"),
        (cancel_of("x", code="expired", status="expired"), "x"),
    ],
)
def test_refusals_are_answered(client: Client, cancel: Cancel, key: str) -> None:
    cancel = msgspec.structs.replace(cancel, unstarted=True)
    deliveries = client.end(cancel)
    completion = client.completion(key)
    assert completion.samples == ()
    assert completion.status == cancel.status
    assert completion.error == ErrorInfo(code=cancel.code, message=cancel.message)
    assert (completion.request_id, completion.entry_id) == (cancel.request_id, cancel.entry_id)
    assert completion.timings.finished_ns == client.now_ns
    assert deliveries.ended[0].opened is None


def test_a_request_of_another_lane_is_dropped_without_output(client: Client) -> None:
    client.step([(5, 40, "")], new=[started(5, request_of())])
    before = list(client.outputs)
    client.end(cancel_of(entry_id="another", elsewhere=True))
    assert len(client.core) == 1, "that was another request of the same id"
    client.end(cancel_of(elsewhere=True, unstarted=True))
    assert len(client.core) == 0
    client.step([(5, 40, "stop")])  # its sequence runs on for a step
    assert client.outputs == before


def test_reports_of_a_slower_replica_about_an_ended_request_are_ignored(
    client: Client,
) -> None:
    """One replica had not begun with it; the other began and tells so later, then ends it too."""
    client.end(cancel_of(unstarted=True))
    assert client.completion().samples == ()
    before = list(client.outputs)
    client.step([(5, 40, "")], new=[started(5, request_of())])
    client.end(cancel_of())
    client.end(cancel_of(unstarted=True))
    assert client.outputs == before
    assert len(client.core) == 0


def test_a_request_cut_short_in_one_replica_starts_in_no_other(client: Client) -> None:
    request = request_of(n=2)
    client.step([(5, 40, "")], new=[started(5, request, 0)])
    client.end(cancel_of())
    assert client.completion().status == "cancelled"
    before = list(client.outputs)
    client.step([(6, 40, "")], new=[started(6, request, 1)])
    client.end(cancel_of())
    assert client.outputs == before


def test_a_refused_duplicate_leaves_the_first_alone(client: Client) -> None:
    client.step([(5, 40, "")], new=[started(5, request_of())])
    client.end(
        cancel_of(entry_id="second", code="duplicate_request", status="error", unstarted=True)
    )
    assert client.completion("second").error is not None
    client.step([(5, 40, "length")])
    assert client.completion("r").status == "done"


def test_an_ended_request_leaves_another_one_with_its_entrys_id_alone(client: Client) -> None:
    """After a failover a server gives the id of an entry that it has lost to another one."""
    entry_id = request_of().entry_id
    client.end(cancel_of("lost", entry_id=entry_id, unstarted=True))
    client.step(new=[started(5, request_of())])
    client.say(5, " fox", "length")
    assert client.completion().samples[0].text == " fox"


def test_a_cancel_may_leave_the_entry_out(client: Client) -> None:
    client.step([(5, 40, "")], new=[started(5, request_of())])
    client.end(cancel_of(entry_id=""))
    assert client.completion().status == "cancelled"


def test_after_a_reset_a_request_ends_with_its_tokens_so_far(client: Client) -> None:
    request = request_of(n=2, stop=("fox trot",))
    client.step([(6, 40, "length")], new=[started(5, request, 0), started(6, request, 1)])
    ids = client.say(5, " the fox")
    client.core.reset()
    client.step([(5, 40, "")])  # the number may be another sequence's by now
    client.end(cancel_of(code="lane_failed", status="error", unstarted=True))
    completion = client.completion()
    assert completion.samples[0].text == " the fox"
    assert completion.samples[0].token_ids == tuple(ids)
    assert_chunks_match(client, completion)


def test_after_a_reset_a_request_may_go_on_with_new_sequences(client: Client) -> None:
    client.step(new=[started(5, request_of(), num_cached=3)])
    ids = client.say(5, " the")
    client.core.reset()
    client.step(new=[started(80, request_of(), num_generated=len(ids), num_cached=9)])
    client.say(80, " fox", "length")
    completion = client.completion()
    assert completion.samples[0].text == " the fox"
    assert completion.usage.cached_tokens == 3
    assert_chunks_match(client, completion)


def test_the_state_of_a_restarted_request_is_requested(client: Client) -> None:
    """Admission, too, has failed, and a server has lost that the request was begun."""
    request = request_of()
    client.step(new=[started(5, request)])
    ids = client.say(5, " the")
    client.core.reset()
    deliveries = client.step([(80, ids[0], "")], new=[started(80, request)])
    assert deliveries.unasked == [f"{request.entry_id} r"]
    assert deliveries.outputs == {}
    client.core.reset()
    item = RecoveryItem("r", request.entry_id, "r")
    assert client.core.recovered(item).samples[0].token_ids == tuple(ids)
    assert client.step(new=[started(81, request, num_generated=len(ids))]).unasked == []


@pytest.mark.parametrize("streamed", [True, False])
def test_a_successor_with_part_of_a_request_restores_it_from_its_stream(
    tokenizer: PreTrainedTokenizerFast, streamed: bool
) -> None:
    """It has absorbed a step with the second sample that was meant for its predecessor."""
    request = request_of(n=2, stream=streamed)
    item = RecoveryItem("r", request.entry_id, "r")
    before, after = Client(tokenizer), Client(tokenizer)
    columns = {"support_logprobs": (-0.5,)}
    before.step([(5, 40, "")], new=[started(5, request, 0)], columns=columns)
    chunks = before.chunks(sample_index=None)
    assert before.core.agrees(item, chunks)
    after.step([(5, 40, ""), (6, 40, "")], new=[started(6, request, 1)])
    chunks += after.chunks(sample_index=None)
    assert after.core.knows(item)
    assert after.core.agrees(item, chunks) == (not streamed)
    after.core.restore(item, chunks, 500)
    assert after.core.agrees(item, chunks)
    assert [each.sample_index for each in after.core.recovered(item).samples] == (
        [0, 1] if streamed else []
    )
    if streamed:
        after.end(cancel_of())
        first, second = after.completion().samples
        assert (first.support_logprobs, second.support_logprobs) == ((-0.5,), None)


def test_rows_of_unequal_length_are_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="zip"):
        client.core.absorb(StepResult(1, (), (1,), (), (), (), (), 0, 0, 0), 0)


def test_steps_before_the_request_is_opened_are_held_back_for_this_request_alone(
    client: Client,
) -> None:
    late, other = request_of(n=2, stop=("fox",)), request_of("q")
    new = [started(5, late), started(6, late, 1), started(7, other)]
    client.open(other)
    client.step([(7, 40, "length")], new=new, late=True)
    ids = client.say(5, " lazy fox")
    client.step([(6, 41, "length")], new=[started(6, late, 1)], late=True)  # it was preempted
    assert [key for key, _ in client.outputs] == ["q", "q"]
    assert (client.halts, len(client.core)) == ([], 0)
    client.open(late)
    completion = client.completion()
    assert (completion.samples[0].text, completion.samples[0].token_ids) == (" lazy ", tuple(ids))
    assert completion.samples[1].token_ids == (41,)
    assert_chunks_match(client, completion)
    assert client.halts == [5]


def test_held_back_steps_keep_their_replica(client: Client) -> None:
    request = request_of(stop=("fox",))
    news = step([(5, client.encode("fox")[0], "")], new=[started(5, request)])
    rest = step([(5, token_id, "") for token_id in client.encode("fox")[1:]])
    for result in (news, rest):
        assert client.core.absorb(result, 1, 3) == Deliveries(1, replica=3)
    assert [each.replica for each in client.open(request)] == [3, 3]
    assert client.halts == [5]


@pytest.mark.parametrize("lost", ["epoch", "lane"])
def test_held_back_steps_are_dropped_with_their_epoch_or_lane(client: Client, lost: str) -> None:
    request = request_of()
    client.step([(5, 40, "")], new=[started(5, request)], late=True)
    if lost == "epoch":
        client.core.reset()
    else:
        client.end(cancel_of(elsewhere=True))
    assert client.open(request) == []
    client.step([(5, 41, "length")])
    assert client.outputs == []


@given(data=st.data())
def test_every_request_ends_once_with_its_streamed_output(
    tokenizer: PreTrainedTokenizerFast, data: st.DataObject
) -> None:
    """Any mixture of requests, interleaved, cut short, preempted."""
    client = Client(tokenizer)
    requests = [
        request_of(
            f"r{k}", n=data.draw(st.integers(1, 3)), stop=data.draw(st.sampled_from([(), ("o",)]))
        )
        for k in range(data.draw(st.integers(1, 3)))
    ]
    waiting = [(request, index) for request in requests for index in range(request.n)]
    running: dict[int, tuple[RequestOpened, int, int]] = {}
    seq_id, left, closed = 0, list(requests), list(requests)
    kinds = st.sampled_from(["open", "start", "rows", "rows", "rows", "preempt", "cancel"])
    for action in data.draw(st.lists(kinds, max_size=25)) + ["end"] * len(requests):
        if action == "open" and closed:
            client.open(closed.pop())
        elif action == "start" and waiting:
            request, index = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            seq_id += 1
            running[seq_id] = (request, index, 0)
            client.step(new=[started(seq_id, request, index)], late=True)
        elif action == "rows" and running:
            rows = []
            for key in data.draw(st.lists(st.sampled_from(sorted(running)), unique=True)):
                request, index, count = running[key]
                reason = data.draw(st.sampled_from(["", "", "", "stop", "length"]))
                rows.append((key, data.draw(st.integers(0, 425)), reason))
                running[key] = (request, index, count + 1)
                if reason:
                    del running[key]
            client.step(rows)
        elif action == "preempt" and running:
            key = data.draw(st.sampled_from(sorted(running)))
            request, index, count = running[key]
            again = started(key, request, index, num_generated=count)
            client.step(new=[again], late=True)
        elif action in ("cancel", "end"):
            request = data.draw(st.sampled_from(requests)) if action == "cancel" else left.pop()
            unstarted = all((request, i) in waiting for i in range(request.n))
            waiting = [pair for pair in waiting if pair[0] is not request]
            running = {k: value for k, value in running.items() if value[0] is not request}
            client.step(ended=[cancel_of(request.request_id, unstarted=unstarted)])
        for key in client.halts:
            running.pop(key, None)
    for request in closed:
        client.open(request)
    assert len(client.core) == 0
    ends = Counter(key for key, output in client.outputs if isinstance(output, Completion))
    assert ends == {request.request_id: 1 for request in requests}
    for request in requests:
        completion = client.completion(request.request_id)
        assert_chunks_match(client, completion)
        if completion.status == "done":
            assert [sample.sample_index for sample in completion.samples] == list(range(request.n))


# --- handovers ------------------------------------------------------------------------------------


def handed_over(seq_id: int, request: RequestOpened, num_generated: int = 1) -> Started:
    return started(seq_id, request, num_generated=num_generated, handed_over=True)


def from_replica(client: Client, replica: int, *args: Any, **kwargs: Any) -> None:
    client.read(client.core.absorb(step(*args, **kwargs), client.now_ns, replica))
    for deliveries in client.core.caught_up(client.now_ns):
        client.read(deliveries)


@pytest.mark.parametrize("order", list(permutations(("open", "first", "second", "third"))))
def test_steps_of_two_replicas_are_delivered_in_order(
    client: Client, order: tuple[str, ...]
) -> None:
    """In any order of steps and request; steps of one replica stay in order."""
    if order.index("third") < order.index("second"):
        return
    request = request_of(stream=True)
    for what in order:
        if what == "open":
            client.open(request)
            for deliveries in client.core.caught_up(client.now_ns):
                client.read(deliveries)
        elif what == "first":
            from_replica(client, 0, [(5, 40, "")], new=[started(5, request)])
        elif what == "second":
            from_replica(client, 1, [(5, 41, "")], new=[handed_over(5, request)])
        else:
            from_replica(client, 1, [(5, 42, "length")])
    completion = client.completion()
    assert completion.samples[0].token_ids == (40, 41, 42)
    assert_chunks_match(client, completion)
    assert client.halts == []


def test_other_sequences_of_a_step_that_came_too_early_are_delivered(client: Client) -> None:
    request, other = request_of(n=2), request_of("q")
    client.open(request)
    client.open(other)
    new = [handed_over(5, request), started(7, other)]
    from_replica(client, 1, [(5, 41, "length"), (7, 50, "length")], new=new)
    assert [key for key, _ in client.outputs if key == "q"]
    new = [started(5, request), started(6, request, 1)]
    from_replica(client, 0, [(5, 40, ""), (6, 60, "length")], new=new)
    completion = client.completion()
    assert [each.token_ids for each in completion.samples] == [(40, 41), (60,)]


@pytest.mark.parametrize("early", [False, True])
def test_a_stop_string_in_the_first_token_ends_the_sequence_where_it_continues(
    client: Client, early: bool
) -> None:
    """Its halt went to the replica that no longer has it."""
    request = request_of(stop=("o",))
    (token_id,) = client.encode("o")
    client.open(request)
    steps = [
        (0, [(5, token_id, "")], [started(5, request)]),
        (1, [(5, 41, "")], [handed_over(5, request)]),
    ]
    for replica, rows, new in steps[::-1] if early else steps:
        from_replica(client, replica, rows, new=new)
    assert client.completion().samples[0].token_ids == (token_id,)
    assert client.halts == [5, 5]
    assert not client.core._early
    assert not client.core.part(StepsAhead)._ahead


def test_a_new_epoch_drops_steps_that_came_too_early(client: Client) -> None:
    request = request_of()
    client.open(request)
    from_replica(client, 1, [(5, 41, "length")], new=[handed_over(5, request)])
    client.core.reset()
    assert client.core.caught_up(1) == []
    assert client.outputs == []
