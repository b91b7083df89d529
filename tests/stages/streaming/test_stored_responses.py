"""Responses for the response cache, and from it: as computed ones, but at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from nano_inference.bus.messages import RequestOpened, StoredResponse
from nano_inference.bus.parts.responses import ResponseCaching
from nano_inference.bus.public import Completion, Timings, Usage
from nano_inference.bus.recovery import RecoveryItem
from nano_inference.bus.sections import with_sections
from nano_inference.stages.streaming.parts.responses import SERVED_TOKENS

from .client import Client, assert_chunks_match, cancel_of, request_of, started, tokens_of

CUT = "|"
"""At a text's end: without its last token, so within its last character."""

TEXT = "The quick brown fox jumps över the lazy dog, twice - and again."


def computed(client: Client, text: str, last: str, **fields: Any) -> StoredResponse | None:
    """Compute a request of the fields, in every sample of which the executor makes these tokens."""
    request = request_of(keeps=7, **fields)
    new = [started(seq_id, request, seq_id) for seq_id in range(request.n)]
    client.step(new=new)
    ids = client.encode(text.removesuffix(CUT))[: -1 if text.endswith(CUT) else None]
    for place, token_id in enumerate(ids):
        reason = last if place == len(ids) - 1 else ""
        rows = [(seq_id, token_id, reason) for seq_id in range(request.n)]
        top = ((token_id, -1.0), (token_id + 1, -2.0))
        tops: dict[str, Any] = {"top_logprobs": (top,) * request.n} if request.logprobs else {}
        tops["columns"] = {"support_logprobs": (-1 / (1 + place),) * request.n}
        ended = client.step(rows, **tops).ended
        if ended:
            return ended[0].response
    raise AssertionError("the request has not ended")


def served(client: Client, response: StoredResponse, **fields: Any) -> Completion:
    request = request_of("again", response=response, **fields)
    (deliveries,) = client.open(request)
    assert len(client.core) == 0, "nothing of it is left"
    assert not deliveries.halts
    assert deliveries.ended[0].response is None
    return client.completion("again")


def plain(completion: Completion) -> Completion:
    """All of it but ids, times and the mark."""
    return msgspec.structs.replace(
        completion, request_id="", entry_id="", timings=Timings(), usage=Usage()
    )


CASES: list[tuple[str, str, dict[str, Any]]] = [
    (TEXT, "length", {}),
    (TEXT, "length", {"n": 3}),
    (TEXT, "stop", {}),
    (TEXT, "length", {"logprobs": 2}),
    (TEXT, "length", {"stop": ("lazy",)}),
    (TEXT, "length", {"stop": ("again.",)}),
    (TEXT, "stop", {"stop": ("again.",)}),
    (TEXT, "length", {"stop": ("quick", "lazy"), "min_tokens": 20}),
    ("ö" * 20 + "€" + CUT, "length", {}),
]


@pytest.mark.parametrize(("text", "last", "fields"), CASES, ids=str)
@pytest.mark.parametrize("streams", [(True, True), (True, False), (False, True), (False, False)])
def test_a_served_response_is_the_computed_one(
    client: Client, text: str, last: str, fields: dict[str, Any], streams: tuple[bool, bool]
) -> None:
    first, second = streams
    response = computed(client, text, last, stream=first, **fields)
    assert response is not None
    before = client.completion()
    after = served(client, response, stream=second, **fields)
    assert plain(after) == plain(before)
    number, prompt = fields.get("n", 1), len(before.prompt_token_ids)
    tokens = before.usage.completion_tokens
    assert tokens_of(after.usage) == Usage(
        prompt_tokens=prompt,
        cached_tokens=prompt * number,
        completion_tokens=tokens,
        cached_completion_tokens=tokens,
    )
    assert before.usage.cached_completion_tokens == 0
    if second:
        assert_chunks_match(client, after)
        chunks = client.chunks("again", None)
        assert len(chunks) == number * -(-tokens // number // SERVED_TOKENS)
    else:
        assert not client.chunks("again", None)


def test_a_response_goes_over_the_wire(client: Client) -> None:
    response = computed(client, TEXT, "stop", logprobs=2, n=2)
    wire = msgspec.msgpack.encode(request_of(response=response))
    opened = msgspec.msgpack.decode(wire, type=RequestOpened)
    assert ResponseCaching.find(opened.parts) == ResponseCaching(0, response)


def test_times_of_a_served_response_name_the_stages_that_it_passed(client: Client) -> None:
    response = computed(client, "abc", "stop")
    assert response is not None
    timings = served(client, response).timings
    assert [time.stage for time in timings.stages] == ["admission", "streaming"]
    assert (timings.received_ns, timings.first_token_ns) == (100, client.now_ns)
    assert timings.finished_ns == client.now_ns


def test_versions_are_those_that_computed_it(client: Client) -> None:
    request = request_of(keeps=7)
    client.step(new=[started(1, request)])
    rows, versions = [(1, 70, "stop")], {"weight_version": 4, "adapter_versions": (2,)}
    (ended,) = client.step(rows, **versions).ended
    response = ended.response
    assert response is not None
    assert (response.weight_version, response.adapter_version) == (4, 2)
    assert response.generation == 7
    (sample,) = served(client, response).samples
    assert (sample.weight_version, sample.weight_versions) == (4, ((4, 0),))
    assert sample.adapter_version == 2
    assert client.chunks("again")[0].weight_version == 4


def test_a_request_that_is_not_to_be_kept_has_no_response(client: Client) -> None:
    client.step(new=[started(1, request_of())])
    (ended,) = client.step([(1, 70, "stop")]).ended
    assert ended.response is None


@pytest.mark.parametrize(
    "second",
    [{"weight_version": 1}, {"adapter_versions": (2,)}],
    ids=["weights", "adapter"],
)
def test_several_versions_are_not_kept(client: Client, second: dict[str, Any]) -> None:
    client.step(new=[started(1, request_of(keeps=7))])
    client.step([(1, 70, "")], **{"adapter_versions": (1,)})
    (ended,) = client.step([(1, 71, "stop")], **{"adapter_versions": (1,)} | second).ended
    assert ended.completion.status == "done"
    assert ended.response is None


def test_samples_of_different_versions_are_not_kept(client: Client) -> None:
    request = request_of(keeps=7, n=2)
    client.step(new=[started(1, request), started(2, request, 1)])
    client.step([(1, 70, "stop")])
    (ended,) = client.step([(2, 70, "stop")], weight_version=1).ended
    assert ended.response is None


@pytest.mark.parametrize("status", ["cancelled", "expired", "error"])
def test_a_request_that_was_cut_short_is_not_kept(client: Client, status: Any) -> None:
    request = request_of(keeps=7, n=2)
    client.step(new=[started(1, request), started(2, request, 1)])
    client.step([(1, 70, "stop"), (2, 70, "")])
    (ended,) = client.end(cancel_of(status=status)).ended
    assert ended.completion.status == status
    assert ended.response is None


def test_a_sample_that_the_executor_aborts_is_not_kept(client: Client) -> None:
    client.step(new=[started(1, request_of(keeps=7))])
    (ended,) = client.step([(1, 70, "abort")]).ended
    assert ended.response is None


def test_a_request_that_a_predecessor_began_is_not_kept(
    client: Client, tokenizer: PreTrainedTokenizerFast
) -> None:
    request = request_of(keeps=7)
    client.step(new=[started(1, request)])
    client.step([(1, 70, "")])
    successor = Client(tokenizer)
    successor.open(request)
    assert successor.core.restore(RecoveryItem("r", "entry-r", "r"), client.chunks(), 500)
    successor.step(new=[started(5, request, num_generated=1)])
    (ended,) = successor.step([(5, 71, "stop")]).ended
    assert ended.completion.samples[0].token_ids == (70, 71)
    assert ended.response is None


def test_a_served_request_that_was_cancelled_before_ends_once(client: Client) -> None:
    response = computed(client, "abc", "stop")
    assert response is not None
    served(client, response)
    assert not client.end(cancel_of("again")).ended
    assert len(client.completions("again")) == 1


def test_a_request_that_is_open_already_is_not_served(client: Client) -> None:
    """It runs since an epoch before."""
    response = computed(client, "abc", "stop")
    request = request_of("again")
    client.step(new=[started(3, request)])
    client.step([(3, 70, "")])
    client.open(with_sections(request, ResponseCaching(0, response)))
    assert not client.completions("again")
    client.step([(3, 71, "stop")])
    assert client.completion("again").samples[0].token_ids == (70, 71)
