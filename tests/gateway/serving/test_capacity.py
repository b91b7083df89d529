"""Capacity: tenants take turns, each tenant's calls in order, and some slots stay free."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.serving.capacity import Capacity, Ticket

NUMBER, MAX_WAITING = 7, 12
TENANTS = st.sampled_from("abcde")
IDS = count()


def ticket_of(tenant: str, wanted: int) -> Ticket:
    return Ticket(tenant, dict.fromkeys(f"r{next(IDS)}" for _ in range(wanted)))


class Played(RuleBasedStateMachine):
    """Calls come, take their slots, leave and give slots back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.number = NUMBER
        self.slots = Capacity(NUMBER, MAX_WAITING, Measures())
        self.tickets: list[Ticket] = []  # in the order in which they came
        self.taken: Counter[str] = Counter()

    @rule(tenant=TENANTS, wanted=st.integers(1, 9))
    def ask(self, tenant: str, wanted: int) -> None:
        free, before = self.slots.free, self.slots.held[tenant]
        waits = any(each.wanted for each in self.tickets if each.tenant == tenant)
        ticket = ticket_of(tenant, wanted)
        self.tickets.append(ticket)
        wanted_before = self.wanted()
        refused_before = [each for each in self.tickets if each.refused]
        self.slots.ask(ticket)
        if before < free and not waits:
            assert ticket.granted > 0
        most = max(self.wanted().values(), default=0)
        refused = [each for each in self.tickets if each.refused and each not in refused_before]
        assert all(wanted_before[each.tenant] >= most for each in refused)

    def wanted(self) -> Counter[str]:
        """The number of slots that each tenant waits for."""
        wanted: Counter[str] = Counter()
        for ticket in self.tickets:
            wanted[ticket.tenant] += ticket.wanted
        return wanted

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if ready := [ticket for ticket in self.tickets if ticket.granted]:
            ticket = data.draw(st.sampled_from(ready))
            ticket.granted -= 1
            ticket.waiting.popitem()
            self.taken[ticket.tenant] += 1

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if holding := [tenant for tenant, number in self.taken.items() if number]:
            tenant = data.draw(st.sampled_from(sorted(holding)))
            self.taken[tenant] -= 1
            self.slots.give_back(tenant)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.tickets:
            ticket = data.draw(st.sampled_from(self.tickets))
            self.slots.leave(ticket)
            self.tickets.remove(ticket)
            assert (ticket.wanted, ticket.granted) == (0, 0)

    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        asking = [each for each in self.tickets if not each.refused and each.waiting]
        if asking:
            ticket = data.draw(st.sampled_from(asking))
            request_id, before = next(iter(ticket.waiting)), len(ticket.waiting)
            self.slots.end(request_id.__eq__)
            assert len(ticket.waiting) == before - 1

    @rule(number=st.integers(2, 9))
    def resize(self, number: int) -> None:
        self.number = number
        self.slots.resize(number)

    @invariant()
    def nothing_is_lost(self) -> None:
        held = Counter(self.taken)
        for ticket in self.tickets:
            held[ticket.tenant] += ticket.granted
        assert all(self.slots.held[tenant] == held[tenant] for tenant in "abcde")
        assert self.slots.free == self.number - held.total()
        assert self.slots.waiting == sum(ticket.wanted for ticket in self.tickets) <= MAX_WAITING

    @invariant()
    def nobody_waits_without_need(self) -> None:
        for ticket in self.tickets:
            assert not ticket.wanted or self.slots.held[ticket.tenant] >= self.slots.free

    @invariant()
    def first_come_first_served_within_a_tenant(self) -> None:
        for tenant in "abcde":
            own = [ticket for ticket in self.tickets if ticket.tenant == tenant]
            waits = [ticket for ticket in own if ticket.wanted]
            if waits:
                behind = own[own.index(waits[0]) + 1 :]
                assert not any(ticket.granted for ticket in behind if not ticket.refused)

    def teardown(self) -> None:
        """Every waiting ticket gets its slots once others give theirs back."""
        for _ in range(1000):
            for ticket in self.tickets:
                self.taken[ticket.tenant] += ticket.granted
                ticket.granted = 0
            if not self.taken.total():
                break
            self.give_all_back()
        assert not any(ticket.wanted for ticket in self.tickets)
        assert self.slots.free == self.number

    def give_all_back(self) -> None:
        for tenant, number in list(self.taken.items()):
            del self.taken[tenant]
            self.slots.give_back(tenant, number)


Played.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPlayed = Played.TestCase


@pytest.mark.parametrize(("tenants", "each"), [(1, 50), (2, 33), (4, 20), (9, 10)])
def test_greedy_tenants_get_equal_shares(tenants: int, each: int) -> None:
    """At most one place apart from `slots / (tenants + 1)` when they come one after the other
    and give back what they have."""
    slots = Capacity(100, 100_000, Measures())
    names = [f"tenant {index}" for index in range(tenants)]
    for name in names:
        slots.ask(ticket_of(name, 10_000))
    for _ in range(100):
        for name in names:
            if slots.held[name] > each:
                slots.give_back(name)
    assert all(abs(slots.held[name] - each) <= 1 for name in names)
    assert slots.ask(ticket_of("newcomer", 1)).granted


def test_tenants_take_turns() -> None:
    slots = Capacity(4, 100, Measures())
    flood, first, second = ticket_of("a", 50), ticket_of("b", 2), ticket_of("c", 2)
    slots.ask(flood)
    assert flood.granted == 2
    slots.ask(first)
    slots.ask(second)
    assert (first.granted, second.granted) == (1, 1)
    slots.give_back("a")  # it has one, and one is free
    assert (flood.granted, first.granted, second.granted) == (2, 1, 1)
    slots.give_back("b")  # it has had its turn longest ago
    assert (flood.granted, first.granted, second.granted) == (3, 2, 1)
    slots.give_back("c")
    assert (flood.granted, first.granted, second.granted) == (3, 2, 2)


def test_the_newest_ticket_of_the_largest_tenant_is_refused() -> None:
    slots = Capacity(2, 10, Measures())
    flood = [ticket_of("a", 4) for _ in range(3)]
    assert not any(slots.ask(each).refused for each in flood[:2])
    other = ticket_of("b", 3)
    slots.ask(other)
    assert not flood[1].refused
    slots.ask(flood[2])
    assert [ticket.refused for ticket in flood] == [False, False, True]
    assert not other.refused
