"""Places: tenants take turns, each tenant's calls in order, and some places stay free."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nano_inference.gateway.serving.places import PlaceQueue, Ticket

NUMBER, MAX_WAITING = 7, 12
TENANTS = st.sampled_from("abcde")


class Played(RuleBasedStateMachine):
    """Calls come, take their places, leave and give places back, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.number = NUMBER
        self.places = PlaceQueue(NUMBER, MAX_WAITING)
        self.tickets: list[Ticket] = []  # in the order in which they came
        self.taken: Counter[str] = Counter()

    def check_changed(self, changed: list[Ticket]) -> None:
        assert all(ticket in self.tickets for ticket in changed)
        # No more places are granted than there are.
        assert self.places.free >= 0 or all(ticket.refused for ticket in changed)

    @rule(tenant=TENANTS, wanted=st.integers(1, 9))
    def ask(self, tenant: str, wanted: int) -> None:
        free, before = self.places.free, self.places.held[tenant]
        waits = any(each.wanted for each in self.tickets if each.tenant == tenant)
        ticket = Ticket(tenant, wanted)
        self.tickets.append(ticket)
        wanted_before = self.wanted()
        changed = self.places.ask(ticket)
        self.check_changed(changed)
        if before < free and not waits:
            assert ticket.granted > 0
        most = max(self.wanted().values(), default=0)
        assert all(wanted_before[each.tenant] >= most for each in changed if each.refused)

    def wanted(self) -> Counter[str]:
        """How many places each tenant waits for."""
        wanted: Counter[str] = Counter()
        for ticket in self.tickets:
            wanted[ticket.tenant] += ticket.wanted
        return wanted

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        if ready := [ticket for ticket in self.tickets if ticket.granted]:
            ticket = data.draw(st.sampled_from(ready))
            ticket.granted -= 1
            self.taken[ticket.tenant] += 1

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if holding := [tenant for tenant, number in self.taken.items() if number]:
            tenant = data.draw(st.sampled_from(sorted(holding)))
            self.taken[tenant] -= 1
            self.check_changed(self.places.give_back(tenant))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.tickets:
            ticket = data.draw(st.sampled_from(self.tickets))
            self.check_changed(self.places.leave(ticket))
            self.tickets.remove(ticket)
            assert (ticket.wanted, ticket.granted) == (0, 0)

    @rule(data=st.data())
    def want_less(self, data: st.DataObject) -> None:
        if asking := [ticket for ticket in self.tickets if ticket.wanted + ticket.granted]:
            self.check_changed(self.places.want_less(data.draw(st.sampled_from(asking))))

    @rule(number=st.integers(2, 9))
    def resize(self, number: int) -> None:
        self.number = number
        self.check_changed(self.places.resize(number))

    @invariant()
    def nothing_is_lost(self) -> None:
        held = Counter(self.taken)
        for ticket in self.tickets:
            held[ticket.tenant] += ticket.granted
        assert all(self.places.held[tenant] == held[tenant] for tenant in "abcde")
        assert self.places.free == self.number - held.total()
        assert self.places.waiting == sum(ticket.wanted for ticket in self.tickets) <= MAX_WAITING

    @invariant()
    def nobody_waits_without_need(self) -> None:
        for ticket in self.tickets:
            assert not ticket.wanted or self.places.held[ticket.tenant] >= self.places.free

    @invariant()
    def first_come_first_served_within_a_tenant(self) -> None:
        for tenant in "abcde":
            own = [ticket for ticket in self.tickets if ticket.tenant == tenant]
            waits = [ticket for ticket in own if ticket.wanted]
            if waits:
                behind = own[own.index(waits[0]) + 1 :]
                assert not any(ticket.granted for ticket in behind if not ticket.refused)

    def teardown(self) -> None:
        """Every waiting ticket gets its places once others give theirs back."""
        for _ in range(1000):
            for ticket in self.tickets:
                self.taken[ticket.tenant] += ticket.granted
                ticket.granted = 0
            if not self.taken.total():
                break
            self.give_all_back()
        assert not any(ticket.wanted for ticket in self.tickets)
        assert self.places.free == self.number

    def give_all_back(self) -> None:
        for tenant, number in list(self.taken.items()):
            del self.taken[tenant]
            self.check_changed(self.places.give_back(tenant, number))


Played.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPlayed = Played.TestCase


@pytest.mark.parametrize(("tenants", "each"), [(1, 50), (2, 33), (4, 20), (9, 10)])
def test_greedy_tenants_get_equal_shares(tenants: int, each: int) -> None:
    """At most one place apart from `places / (tenants + 1)` when they come one after the other
    and give back what they have."""
    places = PlaceQueue(100, 100_000)
    names = [f"tenant {index}" for index in range(tenants)]
    for name in names:
        places.ask(Ticket(name, 10_000))
    for _ in range(100):
        for name in names:
            if places.held[name] > each:
                places.give_back(name)
    assert all(abs(places.held[name] - each) <= 1 for name in names)
    assert places.ask(Ticket("newcomer", 1))


def test_tenants_take_turns() -> None:
    places = PlaceQueue(4, 100)
    flood, first, second = Ticket("a", 50), Ticket("b", 2), Ticket("c", 2)
    places.ask(flood)
    assert flood.granted == 2
    places.ask(first)
    places.ask(second)
    assert (first.granted, second.granted) == (1, 1)
    assert places.give_back("a") == []  # it has one, and one is free
    assert places.give_back("b") == [flood, first]  # it has had its turn longest ago
    assert places.give_back("c") == [second]


def test_the_newest_ticket_of_the_largest_tenant_is_refused() -> None:
    places = PlaceQueue(2, 10)
    flood = [Ticket("a", 4) for _ in range(3)]
    assert not any(ticket.refused for each in flood[:2] for ticket in places.ask(each))
    other = Ticket("b", 3)
    places.ask(other)
    assert not flood[1].refused
    places.ask(flood[2])
    assert [ticket.refused for ticket in flood] == [False, False, True]
    assert not other.refused
