"""A story: the requests and faults of one simulation, drawn from a seed."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import msgspec

from nano_inference.bus.weights import InFlight
from nano_inference.config import STAGES, ReplicaRole

from . import model
from .constraints import PATTERNS

MOST_REQUESTS = 24
"""Most requests of a usual story; those of crowds have up to ten times as many, and of throngs 34
times.
"""

LEASE_MS = 5000
"""So long a lane holds requests without a sign of life."""

VANISHED_MS = 30_000
"""A host that has vanished is away so long, longer than requests wait for it."""

GATEWAY_DIGITS = (4, 6)
"""Seeds that end so have stories with gateways."""

BATCH_TENS = 3
"""Of these, the stories of seeds with this remainder of their tens by four have a batch."""

THRONG_DIGIT = 9
"""Seeds that end so have stories of throngs: more requests than any page, batch or window holds."""

STATE_DIGIT = 7
"""Seeds that end so have a model with recurrent state."""

GATEWAY_SEED = 1000
"""Seeds of requests over gateways begin here, and each has its own."""

BusKind = Literal["memory", "redis"]

Interface = Literal[
    "bus",
    "stream",  # of a gateway
    "whole",  # an answer of a gateway, in one piece
    "background",  # a response that a gateway runs, and that its client looks at
    "batch",  # a line of the story's batch
]

FaultKind = Literal[
    "kill",  # a process, as by kill -9; it starts again later
    "double",  # a process stands still, another takes its place, and then both run
    "crash",  # a stage raises
    "pause",  # a process is stopped and goes on later
    "reset",  # all connections of a process break
    "cut",  # a process and Redis can't reach each other
    "vanish",  # the host of a replica is cut off
    "garbage",  # someone publishes what is no request
    "restart",  # Redis stops and starts with its data, perhaps without the last moments
    "failover",  # a replica without the last moments becomes the master
    "clock",  # a wall clock jumps
    "slow",  # everything takes several times as long
    "weights",  # new weights
    "adapter",  # new weights of an adapter
    "hold",  # generation is paused, and resumed later
    "flush",  # the prefix cache is emptied
]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request, and what its client does.

    Attributes:
        name: Its id.
        at_ms: When it is sent.
        client: Number of its client; over HTTP, of the gateway that it asks first.
        interface: How it is sent.
        keyed: Whether its call has an idempotency key.
        twice: Whether the call is sent twice at the same time.
        drop_ms: Over HTTP, each of its connections breaks after so long; 0 for never.
        prompt: Token ids.
        stop_ids: Tokens that end a sample.
        budget_ms: Its time limit; 0 for none.
        leave_ms: After so long the client stops and cancels it; 0 for never.
        adapter: Its adapter; "" for none.
        constraint: A regular expression that its texts match; "" for none.
        fatal: Whether each step with it fails.
    """

    name: str
    at_ms: int
    client: int = 0
    interface: Interface = "bus"
    keyed: bool = False
    twice: bool = False
    drop_ms: int = 0
    prompt: tuple[int, ...]
    n: int = 1
    max_tokens: int = 4
    min_tokens: int = 0
    seed: int = 0
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stream: bool = True
    tenant: str = "default"
    priority: int = 0
    budget_ms: int = 0
    leave_ms: int = 0
    adapter: str = ""
    constraint: str = ""
    fatal: bool = False


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that goes wrong, or an operator's order.

    Attributes:
        target: A program, a stage, a replica or an adapter; "" for Redis, or all.
        lasts_ms: For how long, or until the program starts again.
        amount: Milliseconds that Redis loses or a clock jumps, or after which a second process
            starts; a factor of slowness.
        mode: How running requests go on with new weights.
    """

    at_ms: int
    kind: FaultKind
    target: str = ""
    lasts_ms: int = 0
    amount: int = 0
    mode: InFlight = "keep"


class Story(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that happens in one simulation.

    Attributes:
        seed: Seed of order and delays.
        split: Whether each stage is a process of its own.
        shuffled: Whether ready callbacks run in any order.
        noise: Exchanges with Redis in a thousand that lose their connection.
        slowness: How many times slower than usual the device is.
        gateways: Their number; in memory one, in the process of all.
        grace_ms: So long a call goes on without its client.
        num_blocks: Number of blocks in a replica's KV cache.
        roles: Roles of the replicas; empty if each does both.
        host_slots, disk_blocks: Host slots and disk blocks of each replica's KV tiers; 0 for none.
        drafts: Most drafted tokens in a row; 0 for none.
        snapshots: Number of snapshots of recurrent state; -1 for a model without.
        snapshot_blocks: As in the settings of the engine.
        adapters: Adapters that are loaded at the start.
        slice_tokens, tenant_slice_tokens, preempts: As in the settings of fairness.
    """

    seed: int
    bus: BusKind = "redis"
    lanes: int = 1
    replicas: int = 1
    split: bool = False
    clients: int = 1
    shuffled: bool = True
    noise: int = 0
    slowness: int = 1
    gateways: int = 0
    grace_ms: int = 10_000
    num_blocks: int = 64
    block_size: int = 4
    max_batch_size: int = 8
    max_tokens_per_batch: int = 64
    max_in_flight: int = 64
    cache_type: Literal["paged", "radix"] = "radix"
    roles: tuple[ReplicaRole, ...] = ()
    host_slots: int = 0
    disk_blocks: int = 0
    drafts: int = 0
    snapshots: int = -1
    snapshot_blocks: int = 0
    adapters: tuple[str, ...] = ()
    slice_tokens: int = 0
    tenant_slice_tokens: int = 64
    preempts: bool = False
    requests: tuple[Request, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def programs(self) -> list[str]:
        """The processes with stages, by name."""
        if self.bus == "memory":
            return ["0"]
        roles = [
            *(stage for stage in STAGES if stage not in ("batching", "executor")),
            *("batching" + self._suffix(i) for i in range(self.replicas)),
            *("executor" + self._suffix(i) for i in range(self.replicas)),
        ]
        if not self.split:
            return [str(lane) for lane in range(self.lanes)]
        return [f"{lane}/{role}" for lane in range(self.lanes) for role in roles]

    @property
    def gateway_programs(self) -> list[str]:
        """The gateways, by name."""
        if self.bus == "memory":
            return ["0"] * min(1, self.gateways)
        return [f"gateway{number}" for number in range(self.gateways)]

    @staticmethod
    def _suffix(replica: int) -> str:
        return f".{replica}" if replica else ""


SHORT_MS = 800
"""Longest fault of a short story, in milliseconds."""


def shorten(story: Story, *, in_memory: bool = False) -> Story:
    """Return a story without long waits, which runs quickly; `in_memory`: in one process, as far as
    its faults have a meaning there."""
    faults = tuple(
        msgspec.structs.replace(
            fault,
            at_ms=fault.at_ms % 600,
            lasts_ms=min(fault.lasts_ms, SHORT_MS + fault.amount * (fault.kind == "double")),
        )
        for fault in story.faults
        if fault.kind in _WITHOUT_PROCESSES or not (in_memory or fault.kind == "vanish")
    )
    requests = tuple(
        msgspec.structs.replace(
            request, at_ms=request.at_ms % 300, client=0 if in_memory else request.client
        )
        for request in story.requests
    )
    if in_memory:
        story = msgspec.structs.replace(
            story,
            bus="memory",
            lanes=1,
            split=False,
            clients=1,
            noise=0,
            gateways=min(story.gateways, 1),
        )
    return msgspec.structs.replace(
        story, faults=faults, requests=requests, slowness=min(story.slowness, 5)
    )


_WITHOUT_PROCESSES = ("crash", "slow", "weights", "adapter", "hold", "flush")


def draw(seed: int, most_requests: int = MOST_REQUESTS) -> Story:
    """Return the story of a seed. Fewer requests make a shorter one."""
    random = Random(seed)
    choice = random.choice
    bus: BusKind = "memory" if random.random() < 0.35 else "redis"
    split = bus == "redis" and random.random() < 0.35
    lanes = choice((1, 1, 2, 3)) if bus == "redis" and not split else 1
    replicas = choice((1, 1, 1, 2, 2, 3)) if lanes < 3 else 1
    is_crowd = most_requests >= MOST_REQUESTS and random.random() < 0.4
    is_throng = most_requests >= MOST_REQUESTS and seed % 10 == THRONG_DIGIT
    if is_throng:
        is_crowd, scale = True, choice((16, 32))
    else:
        scale = choice((2, 4, 8)) if is_crowd else 1
    # Of a crowd either most run at a time, or most wait; of a throng most run.
    room = scale if is_throng else choice((1, scale, scale))
    story = Story(
        seed=seed,
        bus=bus,
        lanes=lanes,
        replicas=replicas,
        roles=choice(((), _ROLES[replicas])) if replicas > 1 else (),
        split=split,
        clients=choice((1, 2)) if bus == "redis" else 1,
        shuffled=random.random() < 0.8,
        noise=choice((0, 0, 3, 20)) if bus == "redis" else 0,
        slowness=choice((1, 5, 20)),
        num_blocks=choice((24, 48, 96)) * room,
        block_size=choice((2, 4, 8)),
        max_batch_size=choice((2, 4, 8)) * room,
        max_tokens_per_batch=choice((8, 32, 128)) * room,
        max_in_flight=choice((4, 16, 64)) * room,
        cache_type=choice(("paged", "radix")),
        host_slots=choice((0, 0, 24, 96)),
        disk_blocks=choice((0, 16, 64)),
        drafts=choice((0, 0, 2, 5)),
        adapters=choice(((), (), ("red",), ("red", "blue"))),
        slice_tokens=choice((0, 0, 4)),
        tenant_slice_tokens=choice((0, 2, 64)),
        preempts=choice((False, True)),
    )
    most = most_requests * (scale + 2 if is_crowd else 1)
    number = random.randint(most // 2 if is_crowd else min(4, most), most)
    spread_ms = choice((50, 300, 1500))
    requests = tuple(_request(random, story, i, spread_ms) for i in range(number))
    number = choice((0, 1, 1, 2, 3, 5))
    faults = sorted((_fault(random, story, spread_ms) for _ in range(number)), key=_at)
    if any(fault.kind in ("restart", "failover") and fault.amount for fault in faults):
        # What a server loses is computed again, and by other weights it would be other tokens.
        faults = [fault for fault in faults if fault.kind not in ("weights", "adapter")]
    story = msgspec.structs.replace(story, requests=requests, faults=tuple(faults))
    # By the seed's last digit, so that tests can choose such stories.
    if seed % 10 == STATE_DIGIT:
        story = _with_states(story)
    is_asked = seed % 10 in GATEWAY_DIGITS
    if is_asked:
        story = _with_gateways(story, most_requests, spread_ms)
    return _with_batch(story) if is_asked and seed // 10 % 4 == BATCH_TENS else story


def _with_batch(story: Story) -> Story:
    """Return a story in which the calls over gateways are lines of a batch, but for responses."""
    plain: dict[str, Any] = {"twice": False, "drop_ms": 0, "leave_ms": 0, "budget_ms": 0}
    plain |= {"interface": "batch", "keyed": True, "tenant": "batches", "priority": 0}
    requests = [
        msgspec.structs.replace(each, **plain) if each.interface in ("stream", "whole") else each
        for each in story.requests
    ]
    return msgspec.structs.replace(story, requests=tuple(requests))


def _with_states(story: Story) -> Story:
    """Return a story with a model that has a recurrent state, half of them without tiers."""
    if story.seed % 20 != STATE_DIGIT:
        story = msgspec.structs.replace(story, roles=(), host_slots=0, disk_blocks=0)
    choice = Random(story.seed * 31 + 11).choice
    return msgspec.structs.replace(
        story,
        snapshots=choice((0, 1, 3, 8, 32, 128)),
        snapshot_blocks=choice((0, 1, 3)),
    )


def _with_gateways(story: Story, most_requests: int, spread_ms: int) -> Story:
    """Return a story with gateways, which some clients ask instead of the bus, and their faults."""
    random = Random(story.seed * 31 + 7)
    choice, draws = random.choice, random.random
    number = 1 if story.bus == "memory" else choice((1, 2, 2, 3))
    story = msgspec.structs.replace(story, gateways=number, grace_ms=choice((300, 2000, 10_000)))
    calls = []
    for index in range(random.randint(1, max(1, most_requests // 2))):
        interface: Interface = choice(("stream", "stream", "stream", "whole", "background"))
        keyed = draws() < 0.6
        request = _request(random, story, index, spread_ms)
        calls.append(
            msgspec.structs.replace(
                request,
                name=f"h{index}",
                client=random.randrange(number),
                interface=interface,
                keyed=keyed,
                twice=keyed and interface != "background" and draws() < 0.2,
                drop_ms=choice((5, 40, 300)) if keyed and draws() < 0.4 else 0,
                leave_ms=choice((5, 50, 400)) if interface == "stream" and draws() < 0.25 else 0,
                # By its seed a request is known in the executor, over all of its calls.
                seed=GATEWAY_SEED + index,
                n=1 if interface == "background" else request.n,
                adapter="",
                fatal=False,  # the executor knows these by the ids of requests on the bus
            )
        )
    faults = list(story.faults)
    for _ in range(choice((0, 1, 1, 2)) if story.bus == "redis" else 0):
        kind: FaultKind = choice(("kill", "kill", "pause", "reset", "cut"))
        lasts_ms = choice((10, 300, 3000)) if kind == "kill" else choice((50, 1000, 9000))
        faults.append(
            Fault(
                at_ms=random.randrange(spread_ms + choice((100, 1000))),
                kind=kind,
                target=choice(story.gateway_programs),
                lasts_ms=0 if kind == "reset" else lasts_ms,
            )
        )
    requests = tuple(
        _constrained(random, each) if draws() < 0.2 and each.interface != "background" else each
        for each in (*story.requests, *calls)
    )
    return msgspec.structs.replace(story, requests=requests, faults=tuple(sorted(faults, key=_at)))


def _constrained(random: Random, request: Request) -> Request:
    """Return a request whose texts match a pattern; the model's own end of text ends them."""
    return msgspec.structs.replace(
        request, constraint=random.choice(PATTERNS), stop_ids=(), min_tokens=0
    )


_ROLES: dict[int, tuple[ReplicaRole, ...]] = {
    2: ("prefill", "decode"),
    3: ("prefill", "decode", "both"),
}


def _at(fault: Fault) -> int:
    return fault.at_ms


def _token(random: Random) -> int:
    return model.FIRST_TOKEN + random.randrange(model.NUM_TOKENS)


def _request(random: Random, story: Story, index: int, spread_ms: int) -> Request:
    shared = Random(random.randrange(3))
    prompt = [_token(shared) for _ in range(random.choice((0, 5, 12)))]
    prompt += [_token(random) for _ in range(random.randint(1, 12))]
    draws = random.random
    return Request(
        name=f"r{index}",
        at_ms=random.randrange(spread_ms),
        client=random.randrange(story.clients),
        prompt=tuple(prompt),
        n=random.choice((1, 1, 1, 2, 4)),
        max_tokens=random.choice((1, 3, 8, 20)),
        min_tokens=random.choice((0, 0, 1)),
        seed=random.randrange(4),
        temperature=random.choice((0.0, 1.0)),
        stop_ids=tuple({_token(random) for _ in range(random.choice((0, 3, 8)))}),
        stream=draws() < 0.8,
        tenant=random.choice(("a", "b", "c")),
        priority=random.choice((0, 0, 1, 5)),
        budget_ms=random.choice((20, 200, 2000)) if draws() < 0.1 else 0,
        leave_ms=random.choice((1, 10, 100)) if draws() < 0.1 else 0,
        adapter=random.choice(("", "", *story.adapters)),
        fatal=draws() < 0.003,
    )


def _fault(random: Random, story: Story, spread_ms: int) -> Fault:
    kinds: list[FaultKind]
    split_replicas = story.split and story.replicas > 1
    if story.bus == "memory":
        kinds = ["crash", "crash", "crash", "slow", "weights", "hold", "flush"]
    else:
        kinds = ["kill", "kill", "kill", "crash", "pause", "reset", "cut", "restart", "failover"]
        kinds += ["double", "garbage"]
        if split_replicas:
            kinds.append("vanish")
        kinds += ["clock", "slow", "weights", "hold", "flush"]
    if story.adapters:
        kinds.append("adapter")
    if story.lanes > 1:
        kinds += ["pause", "cut"]
    kind = random.choice(kinds)
    at_ms = random.randrange(spread_ms + random.choice((100, 1000)))
    programs = story.programs
    target, lasts_ms, amount = "", 0, 0
    match kind:
        case "kill":
            clients = [f"client{i}" for i in range(1, story.clients)]
            target = random.choice([*programs, *clients])
            lasts_ms = random.choice((10, 300, 3000))
        case "crash":
            target = random.choice(STAGES)
        case "pause" | "cut":
            target, lasts_ms = random.choice(programs), random.choice((50, 1000, 9000, 20_000))
            if story.lanes > 1:  # about as long as others wait before they take over
                lasts_ms = random.choice((lasts_ms, random.randrange(LEASE_MS, 2 * LEASE_MS)))
        case "vanish":
            target, lasts_ms = f"{random.randrange(1, story.replicas)}", VANISHED_MS
        case "double":
            target, amount = random.choice(programs), random.choice((1, 50, 1000))
            lasts_ms = amount + random.choice((0, 20, 300, 2000))
        case "reset":
            target = random.choice(programs)
        case "restart":
            lasts_ms, amount = random.choice((10, 800)), random.choice((0, 0, 100, 1000))
        case "failover":
            lasts_ms, amount = random.choice((50, 1000)), random.choice((0, 5, 100, 1000))
        case "clock":
            target = random.choice(("", *programs))
            amount = random.choice((-60_000, -500, 500, 60_000))
        case "slow":
            lasts_ms, amount = random.choice((200, 2000)), random.choice((5, 30))
        case "adapter":
            target = random.choice(story.adapters)
        case "hold":
            lasts_ms = random.choice((50, 1000))
    modes: tuple[InFlight, ...] = ("keep", "retract", "abort")
    mode = random.choice(modes)
    return Fault(at_ms=at_ms, kind=kind, target=target, lasts_ms=lasts_ms, amount=amount, mode=mode)
