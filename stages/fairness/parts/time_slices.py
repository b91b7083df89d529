"""Time slices: sequences pause after so many tokens while other requests wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from ..queue import Flow, PriorityClass, Running
from ..replicas import Replica
from . import Part


class TimeSlices(Part):
    """Counts the tokens of slices, and ends slices."""

    def counted(self, replica: Replica, gained: Sequence[tuple[Running, int]]) -> None:
        config = self.core.config
        slice_tokens = config.max_timeslice_tokens
        for running, number in gained:
            running.in_slice += number
            if self.core.is_low(running):
                replica.made_since_change += number
                due = 0 < slice_tokens <= running.in_slice and not running.leaving
                if due and running.replica == replica.name:
                    replica.due[running.spec.seq_id] = running
        most = config.tenant_timeslice_tokens * len(replica.running)
        replica.made_since_change = min(replica.made_since_change, most)

    def pauses(
        self, full: Sequence[Replica], first: PriorityClass, now_ns: int
    ) -> Sequence[Running]:
        config, asked = self.core.config, list[Running]()
        least = first.order.first()
        assert least is not None, "a class in the order has no waiting tenant"
        for replica in full:
            if config.max_timeslice_tokens or (
                config.tenant_timeslice_tokens and replica.serves_others(least.tenant)
            ):
                self.core.count(replica)
                asked += self._end_slices(replica, first, least, now_ns)
        return asked

    def _end_slices(
        self, replica: Replica, first: PriorityClass, least: Flow, now_ns: int
    ) -> list[Running]:
        """Make room where a slice is used up, another tenant goes first, and KV stays cached.

        A tenant without any place gets one even at the cost of cached KV.
        """
        asked: list[Running] = []
        costly: list[Running] = []
        staying: set[Flow] = set()

        def ask(running: Running, *, behind: bool = False, preempted: bool = False) -> None:
            replica.ask_to_pause(running, now_ns, preempted=preempted, behind=behind)
            left = replica.made_since_change - self.core.config.tenant_timeslice_tokens
            replica.made_since_change = max(0, left)
            asked.append(running)

        for running in self._used_up(replica, least):
            if running.flow in staying:
                continue
            if not self._gives_way(running, first, least, now_ns):
                staying.add(running.flow)
                continue
            behind = least is running.flow
            if replica.keeps_kv(running, before=least.waiting_tokens if behind else 0):
                ask(running, behind=behind)
            elif running.preemptions < self.core.config.max_preemptions:
                costly.append(running)
        if costly and not (asked or least.num_running or self.core.num_leaving):
            slice_tokens = self.core.config.tenant_timeslice_tokens
            others = [
                running
                for running in costly
                if 0 < slice_tokens <= running.in_slice and running.request.tenant != least.tenant
            ]
            if others:
                ask(min(others, key=lambda running: running.num_tokens), preempted=True)
        return asked

    def _used_up(self, replica: Replica, least: Flow) -> Iterator[Running]:
        """Yield sequences whose slice is used up, seen from the waiting tenant `least`.

        Between tenants, all slices count together: `tenant_timeslice_tokens` made by all sequences
        use up one slice, even of a sequence that has made fewer. So a newcomer finds a place in a
        full batch at once, and sequences don't change places more often.
        """
        if self.core.config.max_timeslice_tokens:
            yield from list(replica.due.values())
        slice_tokens = self.core.config.tenant_timeslice_tokens
        if not slice_tokens or replica.made_since_change < slice_tokens:
            return
        others = [
            running
            for running in replica.running.values()
            if self.core.is_low(running)
            and running.in_slice > 0
            and running.request.tenant != least.tenant
        ]
        for running in sorted(others, key=lambda running: -running.in_slice):
            if replica.made_since_change < slice_tokens:
                return
            if not running.leaving:
                yield running

    def _gives_way(self, running: Running, first: PriorityClass, least: Flow, now_ns: int) -> bool:
        """Whether another request would get the place of a sequence that paused now."""
        if not first.would_pass(running.request.priority, now_ns):
            return False
        flow = running.flow
        number = least.num_sequences - self.core.num_leaving
        if flow is not least and flow.priority_class is first:
            # Sequences of the least served tenant that start before both tenants are level.
            price = (
                self.core.config.prefill_weight * len(least.first().request.prompt.token_ids) + 1
            )
            ahead = (flow.counter - least.counter) * least.weight
            number = min(number, ceil(ahead / price) - self.core.num_leaving)
        return number > 0
