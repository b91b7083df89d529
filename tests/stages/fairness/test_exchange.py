"""Several lanes that serve the same tenants: shares over all of them, within the bound of
docs/fairness.md."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_inference.bus.messages import Credit
from nano_inference.config import FairnessConfig
from nano_inference.stages.fairness import FairnessCore
from nano_inference.stages.fairness.parts.exchange import (
    ENTRIES_KEPT,
    SILENT_EXCHANGES,
    Exchange,
)
from nano_inference.store.service import LaneService

from .replica import StepReplica
from .test_tenants import keep_busy

EVERY = 8
"""Steps between two exchanges."""


class Lanes:
    """Lanes with a replica each, on one virtual clock. A lane that is cut off exchanges nothing."""

    def __init__(self, config: FairnessConfig, places: list[int], report_every: int = 1) -> None:
        interval_s = EVERY * 0.01
        config = msgspec.structs.replace(config, exchange_interval_s=interval_s)
        self.lanes = [
            StepReplica(config, places=number, report_every=report_every, lane=str(index))
            for index, number in enumerate(places)
        ]
        for lane in self.lanes:
            lane.core.part(Exchange).begin(1)
        self.tables: dict[str, LaneService] = {}
        self.cut_off: set[int] = set()
        self.unheard: dict[tuple[int, str], float] = {}
        self.steps = 0

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.steps += 1
            for index, lane in enumerate(self.lanes):
                lane.step()
                self.note_unheard(index)
                # Not all at once, as between processes.
                if (self.steps + index) % EVERY == 0:
                    self.exchange(index)

    def exchange(self, index: int) -> None:
        core = self.lanes[index].core
        own = core.part(Exchange).report_service(EVERY * 0.01)
        if index not in self.cut_off:
            core.part(Exchange).apply_service(list(self.tables.values()))
            if own is not None:
                self.tables[own.lane] = own

    def note_unheard(self, index: int) -> None:
        """Note the most that a lane has not heard at one time of what the others have served."""
        exchange, own = self.lanes[index].core.part(Exchange), self.lanes[index].service
        for tenant in {tenant for lane in self.lanes for tenant in lane.service}:
            heard = sum(each.served.get((0, tenant), 0.0) for each in exchange._known.values())
            now = self.service(tenant) - own.get(tenant, 0.0) - heard / self.weight(tenant)
            self.unheard[index, tenant] = max(now, self.unheard.get((index, tenant), 0.0))

    def service(self, tenant: str) -> float:
        return sum(lane.service.get(tenant, 0.0) for lane in self.lanes)

    def weight(self, tenant: str) -> float:
        return self.lanes[0].core.config.tenant_weights.get(tenant, 1.0)


def test_a_tenant_of_one_lane_gets_as_much_as_one_of_both() -> None:
    """Alone each lane is fair, and all of them together are not."""
    for on, share in ((False, 3.0), (True, 1.0)):
        lanes = Lanes(FairnessConfig(), [4, 4])
        for lane in lanes.lanes:
            lane.core.part(Exchange).switch(on)
            lane.core.part(Exchange).begin(1)
        for _ in range(400):
            keep_busy(lanes.lanes[0], "both", 10, 5)
            keep_busy(lanes.lanes[0], "one", 10, 5)
            keep_busy(lanes.lanes[1], "both", 10, 5)
            lanes.step()
        assert lanes.service("both") / lanes.service("one") == pytest.approx(share, rel=0.1)


def test_weights_hold_over_all_lanes() -> None:
    lanes = Lanes(FairnessConfig(tenant_weights={"both": 2.0}), [4, 4])
    for _ in range(400):
        keep_busy(lanes.lanes[0], "both", 10, 5)
        keep_busy(lanes.lanes[0], "one", 10, 5)
        keep_busy(lanes.lanes[1], "both", 10, 5)
        lanes.step()
    # `service` is divided by the weight, so equal is fair.
    assert lanes.service("both") / lanes.service("one") == pytest.approx(1.0, rel=0.1)


def test_idleness_elsewhere_gains_no_credit() -> None:
    """A tenant that asked for nothing anywhere shares from its arrival on, with no past."""
    lanes = Lanes(FairnessConfig(), [4, 4])
    for _ in range(300):
        for lane in lanes.lanes:
            keep_busy(lane, "old", 10, 5)
        lanes.step()
    before = lanes.service("old")
    for _ in range(300):
        for lane in lanes.lanes:
            keep_busy(lane, "old", 10, 5)
            keep_busy(lane, "new", 10, 5)
        lanes.step()
    assert (lanes.service("old") - before) / lanes.service("new") == pytest.approx(1.0, rel=0.1)


@pytest.mark.soak
@given(
    loads=st.lists(
        st.tuples(
            st.integers(1, 30),
            st.integers(1, 40),
            st.sampled_from([0.5, 1.0, 2.0]),
            st.integers(1, 7),
        ),
        min_size=2,
        max_size=4,
    ),
    places=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    visitors=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 30), st.integers(0, 2)), max_size=30
    ),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 250), st.integers(1, 150))),
    report_every=st.sampled_from([1, 8]),
)
def test_a_lane_serves_no_tenant_that_is_ahead_over_all_lanes(
    loads: list[tuple[int, int, float, int]],
    places: list[int],
    visitors: list[tuple[int, int, int]],
    cuts: list[tuple[int, int, int]],
    report_every: int,
) -> None:
    """The bound over several lanes: of two tenants that wait on a lane, it dispatches none whose
    service over all lanes is ahead by more.

    A load's last number says on which lanes the tenant always waits.
    """
    weights = {f"t{index}": weight for index, (_, _, weight, _) in enumerate(loads)}
    lanes = Lanes(FairnessConfig(tenant_weights=weights), places, report_every)
    config = lanes.lanes[0].core.config
    longest = max(tokens for tokens, _, _, _ in loads)
    prompts = max(prompt for _, prompt, _, _ in loads)
    unit = config.prefill_weight * prompts + config.decode_weight * sum(places) * longest
    unit /= min(weights.values())
    for index in (*range(len(places)), *range(len(places))):
        lanes.exchange(index)
    pairs = [
        (lane, one, other)
        for lane in range(len(places))
        for one, other in itertools.permutations(
            [f"t{i}" for i, load in enumerate(loads) if load[3] >> lane & 1], 2
        )
    ]
    # What one is ahead since both wait, or since a lead was last cut, with the lead until then.
    since: dict[tuple[int, str, str], float] = {}
    leads, capped = [0.0] * len(places), [0] * len(places)
    for step in range(300):
        lanes.cut_off = {lane for lane, begin, length in cuts if begin <= step < begin + length}
        for index, (tokens, prompt, _, waits) in enumerate(loads):
            for lane, replica in enumerate(lanes.lanes):
                if waits >> lane & 1:
                    keep_busy(replica, f"t{index}", tokens, prompt)
        for number, (when, tokens, where) in enumerate(visitors):
            if when == step:
                replica = lanes.lanes[where % len(places)]
                replica.submit(f"v{number}", min(tokens, longest), tenant=f"v{number % 3}")
        for lane, one, other in pairs if not step else ():
            since[lane, one, other] = lanes.service(one) - lanes.service(other)
        before = [len(replica.starts) for replica in lanes.lanes]
        lanes.step()
        for lane, one, other in pairs:
            replica = lanes.lanes[lane]
            ahead = lanes.service(one) - lanes.service(other)
            if replica.core.part(Exchange).capped != capped[lane]:
                since[lane, one, other] = ahead
                continue
            if any(name.startswith(f"{one}-") for name in replica.starts[before[lane] :]):
                unheard = sum(lanes.unheard.get((lane, each), 0.0) for each in (one, other))
                bound = 2 * unit + unheard + leads[lane]
                assert ahead - since[lane, one, other] <= bound
        for lane, replica in enumerate(lanes.lanes):
            if replica.core.part(Exchange).capped != capped[lane]:
                capped[lane] = replica.core.part(Exchange).capped
                leads[lane] = max(leads[lane], replica.core.part(Exchange).lead)


# --- the table and the others' ----------------------------------------------------------------


def table(lane: str, served: dict[str, float], epoch: int = 1, number: int = 0) -> LaneService:
    return LaneService(lane, epoch, number, tuple((0, name, c) for name, c in served.items()))


def gained(exchange: Exchange, *tables: LaneService) -> dict[str, float]:
    exchange.report(1.0, 1.0)
    return {tenant: cost for _, tenant, cost in exchange.news(tables)}


def exchange_of(lane: str) -> Exchange:
    return FairnessCore(FairnessConfig(exchange_interval_s=0.5), lane=lane).part(Exchange)


def test_service_is_counted_once() -> None:
    exchange = exchange_of("a")
    exchange.begin(1)
    assert gained(exchange, table("b", {"x": 5})) == {}, "what was before counts nowhere"
    assert gained(exchange, table("b", {"x": 7, "y": 1})) == {"x": 2, "y": 1}
    assert gained(exchange, table("b", {"x": 7, "y": 1})) == {}, "the same table again"
    assert gained(exchange, table("a", {"x": 9})) == {}, "its own, and that of b is lost"
    assert gained(exchange, table("b", {"x": 8, "y": 0.5})) == {"x": 1, "y": -0.5}, "a refund"
    assert gained(exchange, table("b", {"x": 3}, epoch=2)) == {"x": 3}, "after a restart"
    assert gained(exchange, table("b", {"x": 99})) == {}, "of the process that was replaced"
    assert gained(exchange, table("b", {"x": 4}, epoch=2)) == {"x": 1}
    exchange.begin(2)
    assert gained(exchange, table("b", {"x": 6}, epoch=2)) == {"x": 2}, "its own restart"
    assert exchange.elsewhere == 3 + 0.5 + 3 + 1 + 2


def test_a_replaced_lane_leaves_the_table_to_its_successor() -> None:
    exchange = exchange_of("a")
    assert exchange.report(1.0, 1.0) is None, "no epoch has begun"
    exchange.begin(3)
    exchange.record(0, "x", 2.0)
    assert exchange.report(1.0, 1.0) == table("a", {"x": 2.0}, epoch=3)
    exchange.news([table("a", {"x": 1}, epoch=4)])
    assert exchange.report(1.0, 1.0) is None
    exchange.news([table("a", {"x": 1}, epoch=3)])
    assert exchange.report(1.0, 1.0) is not None


def test_a_table_is_bounded_and_loses_nothing_that_was_read() -> None:
    exchange, reader = exchange_of("a"), exchange_of("b")
    exchange.begin(1)
    reader.begin(1)
    gained(reader, table("a", {}))
    heard, last = 0.0, 0
    for number in range(3 * ENTRIES_KEPT):
        exchange.record(0, f"tenant-{number}", 2.0)
        own = exchange.report(1.0, 1.0)
        assert own is not None
        exchange.record(0, "between", 1.0)
        exchange.news([])
        assert len(own.served) <= ENTRIES_KEPT + 8
        heard += sum(gained(reader, own).values())
        last = own.number
    assert heard == exchange.total - 1.0
    assert last == 2


def test_a_lane_that_is_silent_for_long_is_forgotten() -> None:
    exchange = exchange_of("a")
    exchange.begin(1)
    for number in range(SILENT_EXCHANGES + 2):
        gained(exchange, table("b", {"x": 5}), table("c", {"x": number}))
    assert exchange.silent() == ["b"]
    assert exchange.num_lanes == 1


def test_off_records_nothing() -> None:
    replica = StepReplica()
    replica.core.reset(4)
    replica.core.absorb(Credit(replica.places), 0)
    replica.submit("r")
    replica.run()
    assert replica.core.part(Exchange).total == 0
    replica.core.configure(FairnessConfig(exchange_interval_s=1.0))
    replica.submit("r2")
    replica.run()
    assert replica.core.part(Exchange).total == 1 + 4 * 2
    assert replica.core.part(Exchange).report_service(1.0) == table(
        "0", {"default": 9.0}, epoch=4, number=1
    )
