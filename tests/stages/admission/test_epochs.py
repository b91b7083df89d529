"""The epochs in a world in which everything comes late, twice, or not at all.

Whatever happens: no request is lost, none is answered twice, none runs twice at a time, and once
all stages are there every epoch ends, that is new requests are let in again. See `world.py`; what
can be seen only while it happens is looked at there.
"""

from __future__ import annotations

import pytest

from nano_inference.bus.control import Cancel, CancelAll, Drain, ServerRestarted

from .world import LEASE_NS, MAX_LANE_DEATHS, Traits, World

SECOND = 1_000_000_000
SEEDS = 6
ENDS_BY_ITSELF = {
    "refused": "invalid_n",
    "poison": "internal_error",
    "unsendable": "message_too_large",
}


class Play:
    """A world, and what clients do in it."""

    def __init__(self, seed: int, lanes: int, replicas: int, *, calm: bool) -> None:
        """`calm`: no stage fails but by a request, so that lanes have time to take over."""
        self.world = World(seed, lanes, replicas)
        self.rng = self.world.rng
        self.calm = calm

    def run(self, steps: int) -> None:
        """Faults come in bursts: between them the world mostly gets something done."""
        faults, lanes = 0.0, self.world.lanes
        for number in range(steps):
            if number % 20 == 0 and not self.calm:
                faults = self.rng.choice((0.0, 0.02, 0.3))
            if number % 50 == 0:
                # One of several may stand still, until its lease is over or not.
                for lane in lanes:
                    lane.stalled = lane is lanes[0] and len(lanes) > 1 and self.rng.random() < 0.4
            if self.rng.random() < 0.08:
                self.publish()
            if self.rng.random() < 0.04:
                self.meddle()
            self.world.now += self.rng.choice((1, 1, 1, 1, 20, 200)) * 1_000_000
            self.world.step(faults=self.rng.random() < faults)

    def publish(self) -> None:
        rng, length = self.rng, self.rng.randint(1, 4)
        kind = rng.choice(("", "", "", "", "", "kills", *ENDS_BY_ITSELF))
        traits = Traits(length, long=rng.random() < 0.2, **({kind: True} if kind else {}))
        request_id = rng.choice(("", "", f"r{rng.randint(1, 4)}"))
        budget_ns = rng.choice((None, None, 2 * SECOND))
        self.world.publish(traits, request_id, budget_ns)

    def meddle(self) -> None:
        """A client cancels, all is ended from outside, or the server is restarted."""
        lane = self.rng.choice(self.world.lanes)
        if lane.admission is None or not self.world.published:
            return
        entry, _ = self.rng.choice(list(self.world.published.values()))
        entry_id = self.rng.choice((entry.entry_id, ""))
        cancel = Cancel(entry.request.request_id or entry.entry_id, entry_id, "cancelled", "c", "")
        wish = self.rng.choice((cancel, cancel, cancel, CancelAll(), ServerRestarted()))
        lane.admission.ask_for(wish)

    def check(self) -> None:
        """All are answered, each once and as it should be."""
        world = self.world
        for entry_id, (entry, traits) in world.published.items():
            (end,) = world.ends(entry_id)
            possible = {"done", "c", "aborted", "duplicate_request", "lane_failed"}
            for kind, code in ENDS_BY_ITSELF.items():
                if getattr(traits, kind):
                    possible = possible - {"done"} | {code}
            if traits.kills:
                possible -= {"done"}
            if entry.request.budget_ns is not None:
                possible |= {"expired"}
            if any(lane.draining for lane in world.lanes):
                possible |= {"shutting_down"}
            assert end in possible, (entry_id, traits)
            if end == "done":
                key = entry.request.request_id or entry_id
                assert world.streams[key].tokens == traits.length
            if end == "lane_failed":
                assert world.dead_lettered[entry_id] >= MAX_LANE_DEATHS


def play(seed: int, *, lanes: int, replicas: int, drain: bool = False, calm: bool = False) -> None:
    played = Play(seed, lanes, replicas, calm=calm)
    try:
        played.run(300)
        if drain:
            lane = played.world.lanes[0]
            lane.draining = True
            if lane.admission is not None:
                lane.admission.ask_for(Drain(LEASE_NS))
            played.run(60)
        played.world.settle()
        played.check()
    except Exception as error:
        log = (f"{now / 1e9:.3f} {where} {what}" for now, where, what in played.world.log[-100:])
        error.add_note("\n".join((f"seed {seed}", *log)))
        raise


@pytest.fixture
def seeds(soak: bool) -> range:
    """So many plays."""
    return range(25 * SEEDS if soak else SEEDS)


@pytest.mark.soak
@pytest.mark.parametrize(("lanes", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_nothing_is_lost_or_answered_twice_and_every_epoch_ends(
    lanes: int, replicas: int, seeds: range
) -> None:
    for seed in seeds:
        play(seed, lanes=lanes, replicas=replicas)


@pytest.mark.soak
def test_stopped_lanes_are_taken_over_and_write_nothing_more(seeds: range) -> None:
    for seed in range(2 * len(seeds)):
        play(seed, lanes=2, replicas=1, calm=True)


@pytest.mark.soak
def test_a_draining_lane_answers_its_requests_and_takes_no_others(seeds: range) -> None:
    for seed in seeds:
        play(seed, lanes=2, replicas=1, drain=True)
