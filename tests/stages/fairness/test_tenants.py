"""Tenants: each gets its share, within the bound of docs/fairness.md."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import Credit
from nano_inference.config import FairnessConfig
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.queue import IDLE_KEPT

from .replica import StepReplica
from .requests import SECOND, cancel, drain, grant, request, served


def keep_busy(replica: StepReplica, tenant: str, tokens: int, prompt: int) -> None:
    """Keep requests of a tenant waiting, even if it gets all places."""
    number = 0
    while num_waiting(replica, tenant) <= replica.places:  # the first ones may find a place at once
        name = f"{tenant}-{replica.steps}-{number}"
        replica.submit(name, tokens, tenant=tenant, prompt=(7,) * prompt)
        number += 1


def num_waiting(replica: StepReplica, tenant: str) -> int:
    flows = [flow for level in replica.core.queue._classes.values() for flow in level.flows()]
    return sum(flow.num_waiting for flow in flows if flow.tenant == tenant)


def test_the_busiest_tenants_are_listed() -> None:
    replica = StepReplica(places=2)
    for number in range(5):
        replica.submit(f"a-{number}", tenant="a")
    for tenant in "bcd":
        replica.submit(tenant, tenant=tenant)
    replica.step()
    found = replica.core.queue.busiest_tenants(2)
    assert list(found) == ["a", "d"]
    assert sum(map(sum, found.values())) == 6
    assert replica.core.queue.busiest_tenants(0) == {}


def test_idleness_is_not_saved_up() -> None:
    replica = StepReplica(places=1)
    for number in range(40):
        replica.submit(f"busy-{number}", tenant="busy")
    replica.step(80)
    served = replica.service["busy"]
    for number in range(40):
        replica.submit(f"late-{number}", tenant="late")
    replica.step(80)
    gained = replica.service["busy"] - served
    assert replica.service["late"] / gained == pytest.approx(1.0, rel=0.3), (
        "from then on they share"
    )


def test_idling_does_not_pay_a_debt() -> None:
    """A tenant that was served far ahead, leaves and comes back, is still ahead."""
    core = FairnessCore(FairnessConfig())
    core.push(request("first", tenant="greedy"), 0)
    core.push(request("other-0", tenant="other"), 0)
    core.push(request("other-1", tenant="other"), 0)
    grant(core, 1)
    assert drain(core) == ["first"]
    (running,) = core.replicas[""].running.values()
    core.absorb(Credit(1, ((running.spec.seq_id,),) * 500, ended=(running.spec.seq_id,)), 0)
    core.push(request("again", tenant="greedy"), 0)
    grant(core, 2)
    assert drain(core) == ["other-0", "other-1", "again"]


def test_prompts_are_charged_by_computed_tokens() -> None:
    core = FairnessCore(FairnessConfig(prefill_weight=1.0, decode_weight=2.0))
    core.push(request("a", prompt=(1,) * 100, samples=2), 0)
    core.push(request("b", tenant="other"), 0)
    grant(core, 2)
    assert drain(core) == ["a"]
    assert served(core)[0, "default"] == 100, "the whole prompt, once, before it ran"
    first, second = core.replicas[""].running
    core.absorb(Credit(0, started=((first, 40), (second, 1))), 0)
    assert served(core)[0, "default"] == 41, "60 tokens were cached, and the samples share"
    core.absorb(Credit(0, steps=((first, second), (second,))), 0)
    assert served(core)[0, "default"] == 41 + 2 * 3
    core.absorb(Credit(0, started=((first, 55),)), 0)
    assert served(core)[0, "default"] == 47, "computing again is not the tenant's doing"
    assert core.counts.recomputed_tokens == 54


@pytest.mark.soak
@given(
    loads=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 40), st.sampled_from([0.5, 1.0, 2.0])),
        min_size=2,
        max_size=5,
    ),
    places=st.integers(1, 6),
    visitors=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 30), st.integers(1, 40))),
    report_every=st.sampled_from([1, 8]),
    slice_tokens=st.sampled_from([0, 0, 3]),
    tenant_slice_tokens=st.sampled_from([0, 3, 64]),
    locality=st.sampled_from([0, 0, 100]),
    kv_free=st.sampled_from([0, 10**9]),
)
def test_no_tenant_that_always_waits_falls_behind_by_more_than_the_bound(
    loads: list[tuple[int, int, float]],
    places: int,
    visitors: list[tuple[int, int, int]],
    report_every: int,
    slice_tokens: int,
    tenant_slice_tokens: int,
    locality: int,
    kv_free: int,
) -> None:
    weights = {f"t{index}": weight for index, (_, _, weight) in enumerate(loads)}
    config = FairnessConfig(
        tenant_weights=weights,
        max_timeslice_tokens=slice_tokens,
        tenant_timeslice_tokens=tenant_slice_tokens,
        locality_tokens=locality,
    )
    if locality:  # long enough to be looked for
        loads = [(tokens, prompt + 40, weight) for tokens, prompt, weight in loads]
    replica = StepReplica(config, places=places, report_every=report_every, kv_free=kv_free)
    longest = max(tokens for tokens, _, _ in loads)
    prompts = max(prompt for _, prompt, _ in loads)
    unit = config.prefill_weight * prompts + config.decode_weight * places * longest
    bound = 2 * (unit / min(weights.values()) + locality)
    lead: dict[tuple[str, str], list[float]] = {}
    for step in range(300):
        for index, (tokens, prompt, _) in enumerate(loads):
            keep_busy(replica, f"t{index}", tokens, prompt)
        for number, (when, tokens, prompt) in enumerate(visitors):
            if when == step:
                size = (7,) * min(prompt, prompts)
                name = f"v{number}"
                replica.submit(name, min(tokens, longest), tenant=f"v{number % 3}", prompt=size)
        served = {tenant: replica.service.get(tenant, 0.0) for tenant in weights}
        for pair in itertools.combinations(weights, 2):
            # All of them wait from here on. What one gains on the other in any interval:
            seen = lead.setdefault(pair, [])
            seen.append(served[pair[0]] - served[pair[1]])
            assert max(seen) - min(seen) <= bound
        replica.step()


@pytest.mark.soak
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(-3, 8),
            st.integers(1, 3),
            st.integers(1, 12),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from([0, 100]),
    st.sampled_from([0, 10**9]),
)
def test_requests_are_conserved(
    arrivals: list[tuple[int, int, int, int, bool]],
    places: int,
    slice_tokens: int,
    tenant_slice_tokens: int,
    preempt: bool,
    locality: int,
    kv_free: int,
) -> None:
    """Each request finishes once, with any pauses; cancelled requests never start again."""
    config = FairnessConfig(
        max_timeslice_tokens=slice_tokens,
        tenant_timeslice_tokens=tenant_slice_tokens,
        enable_preemption=preempt,
        locality_tokens=locality,
    )
    replica = StepReplica(config, places=places, kv_free=kv_free)
    cancelled = set()
    for number, (tenant, priority, samples, tokens, drop) in enumerate(arrivals):
        replica.submit(str(number), tokens, tenant=str(tenant), priority=priority, samples=samples)
        if drop and str(number) not in replica.started:
            assert replica.core.cancel(cancel(str(number))).unstarted
            cancelled.add(str(number))
        replica.step()
    replica.run()
    wanted = {str(n): each[2] for n, each in enumerate(arrivals) if str(n) not in cancelled}
    assert {name: replica.finished.count(name) for name in set(replica.finished)} == wanted
    core = replica.core
    assert (core.num_queued, core.num_paused, core.credits) == (0, 0, places)
    assert not core.queue._classes
    assert not core._of_request


def test_idle_tenants_are_forgotten() -> None:
    replica = StepReplica(places=2)
    for number in range(4 * IDLE_KEPT):
        replica.submit(f"r{number}", 2, tenant=f"tenant-{number}")
        if number % 2:
            replica.step()
    (level,) = replica.core.queue._classes.values()
    assert replica.core.num_queued < len(level.flows()) <= 2 * (replica.core.num_queued + IDLE_KEPT)
    replica.run()
    assert not replica.core.queue._classes


def test_a_cached_prefix_goes_first_only_within_the_margin() -> None:
    shared = tuple(range(640))
    other = tuple(range(1000, 1640))
    core = FairnessCore(FairnessConfig(locality_tokens=700))
    core.push(request("warm", prompt=shared, tenant="a"), 0)
    grant(core, 1)
    assert drain(core) == ["warm"]
    core.push(request("cold", prompt=other, tenant="b"), 1)
    core.push(request("hit-0", prompt=(*shared, 1), tenant="a"), 2)
    core.push(request("hit-1", prompt=(*shared, 2), tenant="a"), 2)
    grant(core, 1)
    # b came when a was the last served, so they are level.
    assert drain(core) == ["hit-0"]
    (running, *_) = core.replicas[""].running.values()
    core.absorb(Credit(1, ((running.spec.seq_id,),) * 400), 3)
    assert drain(core) == ["cold"], "a is 800 ahead, which is beyond the margin"


def test_a_backlog_does_not_age_its_class() -> None:
    """A class ages by its tenants' waiting; the length of one tenant's queue counts for nothing."""
    core = FairnessCore(FairnessConfig(aging_s=2.0))
    for number in range(100):
        core.push(request(f"noisy-{number}", tenant="noisy"), 0)
    for second in range(0, 60):
        now = second * SECOND
        grant(core, 1, now)
        assert drain(core, now) == [f"noisy-{second}"]
    core.push(request("urgent", priority=1, tenant="quiet"), 60 * SECOND)
    grant(core, 1)
    assert drain(core, 60 * SECOND) == ["urgent"], "though a minute's backlog waits"
