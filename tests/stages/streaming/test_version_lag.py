"""Samples that get too old: also those that wait, run elsewhere, or come back after a failure."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference.bus.parts.version_lag import VersionLagLimit
from nano_inference.bus.public import OnVersionLag, VersionLag
from nano_inference.bus.recovery import RecoveryItem

from .client import Client, assert_chunks_match, cancel_of, request_of, started, step


@pytest.fixture
def client() -> Client:
    return Client(None)


def limited(most: int, beyond: OnVersionLag, id: str = "r", **fields: Any) -> Any:
    return request_of(id, lag=VersionLagLimit(most, beyond), **fields)


def test_an_update_cuts_a_sample_that_waits_before_any_newer_token(client: Client) -> None:
    request, other = limited(1, "cut", n=2), request_of("other")
    new = [started(1, request), started(2, request, 1), started(3, other)]
    client.step([(1, 7, ""), (2, 8, "stop"), (3, 9, "")], new=new, weight_version=4)
    client.step([(3, 9, "")], weight_version=5)
    assert not client.halts
    client.step([(1, 6, ""), (3, 9, "")], weight_version=6)
    assert client.halts == [1]
    first, second = client.completion().samples
    assert (first.token_ids, first.finish_reason) == ((7,), "abort")
    assert first.version_lag == VersionLag(versions=2, outcome="cut")
    assert (second.finish_reason, second.version_lag) == ("stop", VersionLag(versions=0))
    assert client.completion().status == "done"
    assert_chunks_match(client, client.completion())
    client.step([(1, 5, ""), (3, 9, "stop")], weight_version=6)
    assert client.completion("other").samples[0].version_lag is None


def test_weights_of_another_replica_cut_nothing(client: Client) -> None:
    request = limited(0, "cut")
    client.step([(1, 7, "")], new=[started(1, request)], weight_version=4)
    client.core.absorb(step(weight_version=9), 2000, 1)
    client.step([(1, 7, "length")], weight_version=4)
    (sample,) = client.completion().samples
    assert (sample.token_ids, sample.version_lag) == ((7, 7), VersionLag(versions=0))


@pytest.mark.parametrize("restores", [True, False])
def test_a_sample_is_compared_again_as_it_resumes_after_a_failure(
    client: Client, *, restores: bool
) -> None:
    request = limited(1, "cut")
    client.step([(1, 7, "")], new=[started(1, request)], weight_version=4)
    item = RecoveryItem("r", request.entry_id, "r")
    client.core.reset()
    if restores:
        client.core.restore(item, client.chunks(), 500)
    (recovered,) = client.core.recovered(item).samples
    assert recovered.token_ids == (7,)
    client.step([], weight_version=6)
    client.step([(5, 8, "")], new=[started(5, request, num_generated=1)], weight_version=6)
    assert client.halts == [5]
    (sample,) = client.completion().samples
    assert (sample.token_ids, sample.version_lag) == ((7,), VersionLag(versions=2, outcome="cut"))


def test_a_retracted_sample_begins_anew_with_another_sequence(client: Client) -> None:
    request = limited(0, "retract", stream=False)
    client.step([(1, 7, "")], new=[started(1, request)], weight_version=4)
    made = client.step([(1, 8, "")], weight_version=5)
    assert made.retracted == {client.core.entries()[0]: [0]}
    assert client.halts == [1]
    item = RecoveryItem("r", request.entry_id, "r")
    (recovered,) = client.core.recovered(item).samples
    assert (recovered.token_ids, recovered.finished) == ((), False)
    client.step([(1, 9, "")], weight_version=5)  # of the halted sequence
    client.step([(2, 3, "")], new=[started(2, request)], weight_version=5)
    client.step([(2, 4, "stop")], weight_version=5)
    (sample,) = client.completion().samples
    assert (sample.token_ids, sample.logprobs) == ((3, 4), (-3.0, -4.0))
    assert sample.weight_versions == ((5, 0),)
    assert sample.version_lag == VersionLag(versions=0, outcome="retracted", num_retractions=1)


def test_a_cancelled_request_has_the_lag_of_its_samples(client: Client) -> None:
    request = limited(0, "flag")
    client.step([(1, 7, "")], new=[started(1, request)], weight_version=4)
    client.step([(1, 7, "")], weight_version=6)
    client.end(cancel_of())
    (sample,) = client.completion().samples
    assert sample.version_lag == VersionLag(versions=2, outcome="flagged")
