"""A replica without a device: the batching core, and an executor that samples by a rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from nano_inference.bus.control import (
    AdapterReady,
    AuditedBlock,
    ControlSession,
    ImageCapacity,
    MemoryState,
    ReplicaCapacity,
    TierCapacity,
    TiersChanged,
    WeightsReady,
)
from nano_inference.bus.media import MediaItem
from nano_inference.bus.messages import (
    AdmittedRequest,
    Credit,
    Handover,
    Prompt,
    RequestInfo,
    SequenceSpec,
)
from nano_inference.bus.parts.adapters import AdapterCapacity
from nano_inference.bus.parts.embeddings import PooledResult
from nano_inference.bus.parts.handover import HandoverRoute, HandoversResult, first_tokens
from nano_inference.bus.parts.images import PromptMedia
from nano_inference.bus.parts.sessions import SessionTurn
from nano_inference.bus.parts.speculation import DraftCapacity
from nano_inference.bus.parts.states import StateCapacity
from nano_inference.bus.pooling import PooledPrompt, Pooling
from nano_inference.bus.public import KVSession
from nano_inference.bus.sections import Section, with_sections
from nano_inference.bus.steps import KVMove, NewSequence, StepPlan, StepResult
from nano_inference.bus.weights import InFlight
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.batching.parts.handover.departures import Departure, Departures
from nano_inference.stages.batching.parts.images.cache import ImageCache
from nano_inference.stages.batching.parts.images.part import Images
from nano_inference.stages.batching.parts.kv_events import KVEvents
from nano_inference.stages.batching.parts.sessions import Sessions
from nano_inference.stages.batching.parts.snapshots.part import RecurrentStates
from nano_inference.stages.batching.parts.tiers.part import Tiers
from nano_inference.stages.batching.parts.tiers.tiers import KVTiers
from nano_inference.store.loaded_adapter import LoadedAdapter

from ...kv_router import Router
from ...sections import read
from .events import check_router
from .index import check_index
from .states import RuleStates

STOP = 7

CacheType = Literal["paged", "radix"]
CACHE_TYPES: tuple[CacheType, ...] = ("paged", "radix")


def next_token(token_ids: list[int]) -> int:
    """The model: a function of all tokens before, so that a wrong prefix changes the output."""
    value = 17
    for token in token_ids:
        value = (value * 31 + token + 1) % 1009
    return value % 50


class RuleExecutor:
    """Applies plans to numbers in place of KV: each slot holds the token written to it.

    Reading a slot without the sequence's own token fails, which detects a block that two sequences
    write, and a hit on a block that isn't computed.

    Attributes:
        peers: Other executors, by address.
        is_patient: Whether to wait for their blocks, where they are announced and not offered.
        offered: Name of the block in each host slot that they may read.
    """

    def __init__(self, num_blocks: int, block_size: int, num_snapshots: int | None = None) -> None:
        self.states = None if num_snapshots is None else RuleStates(num_snapshots)
        self.peers: dict[str, RuleExecutor] = {}
        self.is_patient = False
        self.offered: dict[int, bytes] = {}
        self.block_size = block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.sequences: dict[int, NewSequence] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.generated: dict[int, int] = {}
        self.done: set[int] = set()
        self.num_computed = 0
        self.host: dict[int, list[int]] = {}
        self.disk: dict[bytes, list[int]] = {}
        self.changes: deque[TiersChanged] = deque()
        self.fetches: deque[KVMove] = deque()

    def execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.finished:
            self.tokens.pop(seq_id)
            self.done.discard(seq_id)
        if "kv_cache" in read(plan).release:
            assert not plan.seq_ids
            self.slots = [[-1] * self.block_size for _ in self.slots]
        for new in plan.new:
            assert new.seq_id not in self.tokens
            self.sequences[new.seq_id] = new
            self.tokens[new.seq_id] = list(new.token_ids)
            self.tables[new.seq_id] = list(new.block_ids)
            self.computed[new.seq_id] = new.num_cached
            self.generated[new.seq_id] = new.num_generated
        if self.states is not None:
            for move in read(plan).kv_moves:
                if move.state:
                    self.states.tiers.move(move)
            self.states.apply(plan)
        for seq_id, blocks in plan.grown:
            self.tables[seq_id].extend(blocks)
        for move in read(plan).kv_moves:
            if not move.state:
                self._move(move)
        for source, destination in plan.copies:
            self.slots[destination] = list(self.slots[source])
        rows = []
        pooled = []
        source = -1
        ran = set(plan.seq_ids) - self.done
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            if seq_id in self.done:
                continue
            row = self._row(seq_id, count) if count else self._share(seq_id, source)
            source = seq_id if count else source
            if self.sequences[seq_id].info.pooling is None:
                rows += row
            elif row:
                pooled.append(PooledPrompt(seq_id, b""))
        if self.states is not None:
            self.states.save(plan, ran)
        for move in read(plan).kv_offers:
            self._move(move)
        seq_ids, tokens, reasons = zip(*rows, strict=True) if rows else ((), (), ())
        return StepResult(
            step_id=plan.step_id,
            started=(),
            seq_ids=seq_ids,
            token_ids=tokens,
            logprobs=(0.0,) * len(rows),
            finish_reasons=reasons,
            ended=plan.ended,
            weight_version=0,
            start_ns=0,
            end_ns=0,
            parts=(PooledResult(tuple(pooled)),),
        )

    def _move(self, move: KVMove) -> None:
        if move.state:
            assert self.states is not None
            self.states.tiers.move(move)
            return
        match move.kind:
            case "store":
                self._put(move.slot, self.slots[move.block_id])
                if move.write:
                    self._write(move)
            case "write":
                self._write(move)
            case "load":
                self.slots[move.block_id] = list(self.host[move.slot])
            case "fetch":
                self.fetches.append(move)
            case "offer":
                if move.block_id >= 0:
                    self._put(move.slot, self.slots[move.block_id])
                self.offered[move.slot] = move.name
            case "drop":
                self.disk.pop(move.name, None)
            case "compare":
                loaded, computed = (str(self.slots[b]) for b in (move.other, move.block_id))
                audited = AuditedBlock(move.name, loaded, computed)
                self.changes.append(TiersChanged(audited=(audited,)))

    def _write(self, move: KVMove) -> None:
        self.disk[move.name] = self.host[move.slot]
        self.changes.append(TiersChanged(stored=(move.name,)))

    def _put(self, slot: int, block: list[int]) -> None:
        self.offered.pop(slot, None)
        self.host[slot] = list(block)

    def _fetched(self, move: KVMove) -> list[int] | None:
        if not move.source:
            return self.disk.get(move.name)
        peer = self.peers[move.source]
        return peer.host[move.other] if peer.offered.get(move.other) == move.source_name else None

    def tier_change(self) -> TiersChanged | None:
        """Return the next change of the tiers' threads; None for none."""
        if self.states is not None:
            peers = {f"{address}, states": each.states for address, each in self.peers.items()}
            known = {name: each.tiers for name, each in peers.items() if each is not None}
            change = self.states.tiers.change(known, is_patient=self.is_patient)
            if change is not None:
                return TiersChanged(states=change)
        if self.fetches:
            move = self.fetches.popleft()
            if (block := self._fetched(move)) is None:
                if move.source and self.is_patient:
                    self.fetches.append(move)
                    return None
                return TiersChanged(lost=(move.name,))
            self._put(move.slot, block)
            return TiersChanged(fetched=(move.name,))
        return self.changes.popleft() if self.changes else None

    def forget(self) -> None:
        self.tokens.clear()
        self.done.clear()
        self.fetches.clear()
        if self.states is not None:
            self.states.forget()

    def _row(self, seq_id: int, count: int) -> list[tuple[int, int, str]]:
        tokens, table = self.tokens[seq_id], self.tables[seq_id]
        start = self.computed[seq_id]
        assert start + count <= len(tokens)
        for position in range(start, start + count):
            block, offset = divmod(position, self.block_size)
            self.slots[table[block]][offset] = tokens[position]
        if self.states is not None:
            assert self.states.length(seq_id) == start
            self.states.compute(self.sequences[seq_id], tokens[start : start + count])
        self.computed[seq_id] += count
        self.num_computed += count
        for position in range(start + count):
            block, offset = divmod(position, self.block_size)
            assert self.slots[table[block]][offset] == tokens[position], "a foreign block was read"
        return self._sample(seq_id) if self.computed[seq_id] == len(tokens) else []

    def _share(self, seq_id: int, source: int) -> list[tuple[int, int, str]]:
        tokens = self.tokens[seq_id]
        assert self.computed[seq_id] == self.computed[source] == len(tokens)
        # The source has sampled already.
        assert self.tokens[source][:-1] == tokens, "it samples from foreign logits"
        if self.states is not None:
            self.states.share(seq_id, source)
        return self._sample(seq_id)

    def _sample(self, seq_id: int) -> list[tuple[int, int, str]]:
        tokens = self.tokens[seq_id]
        token = next_token(tokens)
        tokens.append(token)
        self.generated[seq_id] += 1
        sampling = self.sequences[seq_id].sampling
        reason = ""
        if token in sampling.stop_token_ids:
            reason = "stop"
        elif self.generated[seq_id] == sampling.max_tokens:
            reason = "length"
        if reason:
            self.done.add(seq_id)
        return [(seq_id, token, reason)]


class FakeReplica:
    """The batching core and a rule executor; results come back late."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_size: int = 8,
        max_tokens_per_batch: int = 32,
        steps_ahead: int = 2,
        cache_type: CacheType = "radix",
        max_draft_tokens: int = 0,
        host_slots: int = 0,
        disk_blocks: int = 0,
        kv_events: bool = False,
        address: str = "",
        session_share: float = 0.5,
        pipeline_stages: int = 1,
        images: ImageCapacity | None = None,
        num_snapshots: int | None = None,
        snapshot_blocks: int = 0,
        state_slots: int = 4,
    ) -> None:
        config = EngineConfig(
            kv_audit_every=2,
            kv_session_share=session_share,
            kv_events=kv_events,
            cache_type=cache_type,
            block_size=block_size,
            max_tokens_per_batch=max_tokens_per_batch,
            speculation="auto" if max_draft_tokens else "off",
            max_draft_tokens=max_draft_tokens or 16,
            state_snapshot_blocks=snapshot_blocks,
        )
        parts: list[Section] = []
        if max_draft_tokens:
            parts.append(DraftCapacity())
        if host_slots:
            states = None
            if num_snapshots is not None:
                sizes = (state_slots, disk_blocks, "", "", 0, "", 1, 1, 1000)
                states = TierCapacity(*sizes, address=address and f"{address}, states")
            sizes = (host_slots, disk_blocks, "", "", 0, "", 1, 1, 1000)
            parts.append(TierCapacity(*sizes, address=address, states=states))
        if images is not None:
            parts.append(images)
        if num_snapshots is not None:
            parts.append(StateCapacity(num_snapshots, 1000))
        capacity = ReplicaCapacity(
            num_blocks,
            block_size,
            4096,
            50,
            "rule",
            max_batch_size=max_batch_size,
            exact=True,
            pipeline_stages=pipeline_stages,
            parts=tuple(parts),
        )
        self.stages = pipeline_stages if steps_ahead > 1 else 1
        self.capacity = capacity
        self.core = BatchingCore(config, capacity, steps_ahead=steps_ahead)
        self.executor = RuleExecutor(num_blocks, block_size, num_snapshots)
        self.plans: deque[StepPlan] = deque()
        self.outputs: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.pooled: list[int] = []
        self.ended: list[str] = []
        # Each with the number of the replica that it goes to.
        self.first_tokens: list[tuple[int, Handover]] = []
        self.log: list[StepPlan] = []
        self.now_ns = 0
        self.router = Router()

    def add(
        self,
        prompt: list[int],
        seq_ids: int | Sequence[int],
        *,
        name: str = "",
        max_tokens: int = 8,
        stop: bool = False,
        priority: int = 0,
        prompt_logprobs: int | None = None,
        deadline_ns: int | None = None,
        rank: int = 0,
        pooling: Pooling | None = None,
        adapter: str = "",
        successors: tuple[int, ...] = (),
        session: KVSession | None = None,
        tenant: str = "",
        media: tuple[MediaItem, ...] = (),
    ) -> None:
        """Add a request.

        Args:
            prompt: Its tokens.
            seq_ids: Ids of its samples.
            name: Its id; the first sample's by default.
            max_tokens: Must be 1 with `pooling`.
            stop: Whether samples end with the token STOP.
            priority, prompt_logprobs, deadline_ns, rank, pooling, adapter, successors: As in the
                messages.
            session, tenant, media: As in the messages.
        """
        seq_ids = (seq_ids,) if isinstance(seq_ids, int) else seq_ids
        name = name or str(seq_ids[0])
        sampling = SamplingParams(
            max_tokens=max_tokens,
            stop_token_ids=frozenset({STOP} if stop else ()),
            prompt_logprobs=prompt_logprobs,
        )
        info = RequestInfo(name, name, adapter=adapter, pooling=pooling)
        specs = tuple(SequenceSpec(seq_id, index, 0) for index, seq_id in enumerate(seq_ids))
        about = (info, Prompt(tuple(prompt)), sampling, specs)
        parts: list[Section] = [PromptMedia(tuple(media))]
        if successors:
            parts.append(HandoverRoute(tuple(successors)))
        if session is not None:
            parts.append(SessionTurn(session))
        request = AdmittedRequest(*about, tenant, priority, rank=rank, parts=tuple(parts))
        self.send(request, deadline_ns)

    def send(self, request: AdmittedRequest, deadline_ns: int | None = None) -> None:
        """Add a request as fairness sends it."""
        self.core.add(request, deadline_ns)

    def plan(self, now_ns: int | None = None) -> bool:
        self.now_ns = self.now_ns if now_ns is None else now_ns
        plan = self.core.plan(self.now_ns)
        if plan is None:
            return False
        if self.stages > 1:
            in_flight = {seq_id for each in self.plans for seq_id in each.seq_ids}
            assert in_flight.isdisjoint(plan.seq_ids), "a sequence is in two plans in flight"
            assert len(self.plans) <= self.stages, "more plans are in flight than one more"
        self.plans.append(plan)
        self.log.append(plan)
        return True

    def retire(self) -> bool:
        """Execute the oldest plan and absorb its result."""
        if not self.plans:
            return False
        plan = self.plans.popleft()
        result = self.executor.execute(plan)
        for row, seq_id in enumerate(result.seq_ids):
            self.outputs.setdefault(seq_id, []).append(result.token_ids[row])
            if result.finish_reasons[row]:
                self.reasons[seq_id] = result.finish_reasons[row]
        if (pooled := PooledResult.find(result.parts)) is not None:
            self.pooled += [prompt.seq_id for prompt in pooled.prompts]
        self.ended += [cancel.request_id for cancel in result.ended]
        self.absorb(plan, result)
        return True

    def absorb(self, plan: StepPlan, result: StepResult) -> None:
        """Apply a result, and send the first tokens that other replicas wait for."""
        summary = result.summary(*HandoversResult.of(read(plan).handovers, result))
        self.first_tokens += first_tokens(plan, summary)
        self.core.absorb(summary)

    def take_first_tokens(self) -> list[tuple[int, Handover]]:
        """Return those that other replicas were sent since the last call."""
        first, self.first_tokens = self.first_tokens, []
        return first

    def change_tiers(self) -> bool:
        """Pass on what the tiers' threads have done next."""
        if (change := self.executor.tier_change()) is None:
            return False
        self.core.receive(change, self.now_ns)
        return True

    # --- optional parts -----------------------------------------------------------------------

    @property
    def sessions(self) -> Sessions:
        """The sessions, made with the first look."""
        parts = self.core._parts.handlers(ControlSession("", "", "pin"))
        return next(part for part in parts if isinstance(part, Sessions))

    @property
    def tiers(self) -> KVTiers | None:
        part = self.core.find(Tiers)
        return part.blocks if part is not None else None

    @property
    def states(self) -> RecurrentStates:
        return self.core.part(RecurrentStates)

    @property
    def images(self) -> ImageCache | None:
        part = self.core.find(Images)
        return part.cache if part is not None else None

    def take_departures(self) -> list[Departure]:
        part = self.core.find(Departures)
        return part.take_departures() if part is not None else []

    def change_weights(self, version: int, in_flight: InFlight) -> None:
        self.core.receive(WeightsReady(version, in_flight), self.now_ns)

    def change_adapter(self, id: str, version: int, in_flight: InFlight) -> None:
        self.core.receive(AdapterReady(id, version, in_flight), self.now_ns)

    def change_memory(self, lacks: tuple[str, ...], release: tuple[str, ...]) -> None:
        self.core.receive(MemoryState(lacks, release), self.now_ns)

    def set_adapters(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Begin an epoch with an executor that has these adapters."""
        adapters = AdapterCapacity(tuple(adapters))
        self.core.restart(with_sections(self.capacity, adapters))

    def retire_all(self) -> None:
        """Retire all plans in flight."""
        while self.retire():
            pass

    def steps(self, number: int, *, ahead: int = 2) -> None:
        """Retire so many plans, with up to `ahead` in flight."""
        for _ in range(number):
            for _ in range(ahead):
                self.plan()
            self.retire()

    def lose_plans(self) -> None:
        """Lose the plans in flight, and the executor's state but its slots."""
        self.plans.clear()
        self.executor.forget()
        self.core.forget_plans()

    def check(self) -> None:
        """Run all conservation checks, with the whole cache index, and with a router's."""
        self.core.check()
        check_index(self.core.cache)
        if self.core.find(KVEvents) is not None:
            check_router(self.core.cache, self.router)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            while self.plan() or self.change_tiers():
                pass
            if not self.retire():
                return
        raise AssertionError("the replica did not become idle")


def reported(replica: FakeReplica) -> Credit:
    """The report for fairness, which must be due."""
    report = replica.core.take_report()
    assert report is not None
    return report


def expected(prompt: list[int], max_tokens: int, *, stop: bool = False) -> list[int]:
    """The tokens of a sequence, no matter what runs beside it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
        if stop and tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]
