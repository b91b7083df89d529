"""The executor's core with the model of hashes, and KV memory that finds a wrong block."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nano_inference.bus.control import MemoryState, ReplicaCapacity
from nano_inference.bus.parts.adapters import AdapterCapacity, AdaptersResult
from nano_inference.bus.parts.speculation import DraftCapacity, DraftsResult, VerifiedDraft
from nano_inference.bus.parts.states import StateCapacity
from nano_inference.bus.sections import Section
from nano_inference.bus.steps import NewSequence, StepPlan, StepResult
from nano_inference.config import EngineConfig, WeightsError
from nano_inference.stages.executor.driver.sequences import started_sequences
from nano_inference.stages.executor.parts.adapters import AdapterChanges
from nano_inference.stages.executor.parts.memory import MemoryRelease
from nano_inference.stages.executor.parts.tiers import Tiers
from nano_inference.stages.executor.parts.weights import WeightChanges
from nano_inference.stages.executor.runner.adapters.peft import AdapterLimits
from nano_inference.stages.executor.runner.adapters.table import AdapterTable

from ..sections import read
from . import model
from .constraints import Constrained
from .states import SimulatedStates, State
from .tiers import Block, SimulatedTiers

STEP_NS, TOKEN_NS = 1_500_000, 20_000
"""Device time of a step, and of each of its tokens."""

MAKES = Callable[[list[Block], int, list[State] | None], SimulatedTiers]
"""Makes tiers for a KV cache and the version of the weights that were loaded."""


class WrongKV(Exception):
    """A step would read KV of other tokens, or of other weights."""


class FatalRequest(Exception):
    """A request that fails each step."""


class LostPlan(ValueError):
    """A plan builds on one that has not come."""


class _Sequence:
    """A sequence: its tokens, the hash at each, its blocks."""

    def __init__(self, new: NewSequence) -> None:
        self.new = new
        self.chain = model.chains_of(new.cache_scope, new.token_ids)
        self.length = len(new.token_ids)
        self.tokens = list(new.token_ids)
        self.table = list(new.block_ids)
        self.computed = new.num_cached
        self.generated = new.num_generated
        self.finished = False
        sampling = new.sampling
        self.seed = 0 if sampling.temperature == 0 else new.sample.seed
        self.constrained: Constrained | None = None
        if sampling.constraint is not None:
            generated = new.token_ids[len(new.token_ids) - new.num_generated :]
            self.constrained = Constrained(sampling.constraint, generated)

    def append(self, token: int) -> None:
        if self.constrained is not None:
            self.constrained.advance(token)
        self.chain.append(model.extend(self.chain[-1], token))
        self.tokens.append(token)
        self.length += 1
        self.generated += 1


class SimulatedExecutor:
    """`ExecutorCore` for the simulation: real plans, weights, adapters and results; no tensors.

    A slot of KV holds the hash of all tokens up to its own, and the weights and adapter that
    computed it. Each step reads all slots of its rows.
    """

    def __init__(
        self,
        config: EngineConfig,
        now_ns: Callable[[], int],
        num_blocks: int,
        max_batch_size: int,
        max_model_len: int,
        note_weights: Callable[[int, int], object],
        make_tiers: MAKES | None = None,
        fatal: Collection[str] = (),
        note_request: Callable[[int | None, str], object] = lambda seed, request_id: None,
        num_snapshots: int = -1,
    ) -> None:
        """Args:
        config: The settings.
        now_ns: The clock.
        num_blocks, max_batch_size, max_model_len: Limits of the device and the model.
        note_weights: Called with the version and the number of weights that are in place.
        make_tiers: None for no tiers.
        fatal: Ids of requests that fail each step.
        note_request: Called with the seed and the id of each request that begins.
        num_snapshots: Snapshots of recurrent state; -1 for a model without.
        """
        self.states = SimulatedStates(num_snapshots) if num_snapshots >= 0 else None
        self._note_request = note_request
        self._config, self._fatal = config, fatal
        self._note_weights = note_weights
        self._now_ns = now_ns
        self._max_model_len = max_model_len
        self.max_batch_size = max_batch_size
        self.num_blocks = num_blocks
        size = config.block_size
        self._blocks: list[Block] = [([0] * size, [(-1, 0)] * size) for _ in range(num_blocks)]
        self._sequences: dict[int, _Sequence] = {}
        self._last_step = 0
        self._module = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self._module.weight.zero_()
        self._blocked: WeightsError | None = None
        self._in_place = (0, 0)
        snapshots = self.states.snapshots if self.states is not None else None
        self.tiers = None
        if make_tiers is not None:
            self.tiers = make_tiers(self._blocks, 0, snapshots)
        # Parts of the real core that the shell reads.
        device = torch.device("cpu")
        self.model = SimpleNamespace(
            layers=(),
            mixers=None,
            device=device,
            module=self._module,
            whole=self._module,
            shards=None,
            latent_attention=False,
            checkpoint_notes=(),
        )
        self.adapters = AdapterTable(self.model, AdapterLimits())  # type: ignore[arg-type]
        backend = SimpleNamespace(name="simulated")
        self.runner = SimpleNamespace(backend=backend, adapters=self.adapters)
        self.off = {"kernels": "simulated", "graphs": "", "speculation": "", "deterministic": ""}
        self.ranks = None
        self.cache = None
        memory = SimpleNamespace(lacks=(), pending=())
        table = SimpleNamespace(change_adapter=lambda *switched: None)
        state: Any = SimpleNamespace(
            config=config, model=self.model, runner=self.runner, ranks=None, table=table
        )
        changes = WeightChanges(state)
        self.weights = changes.manager
        self._parts: dict[type, Any] = {
            WeightChanges: changes,
            AdapterChanges: AdapterChanges(state),
            MemoryRelease: SimpleNamespace(memory=memory, state_now=lambda: MemoryState((), ())),
            Tiers: SimpleNamespace(blocks=self.tiers),
        }
        self.constraints = SimpleNamespace(take_waits_ns=lambda: ())
        self.runs_ahead = False

    def capacity(self) -> ReplicaCapacity:
        parts: list[Section] = [AdapterCapacity(self.adapters.describe())]
        if self._config.speculation == "auto":
            parts.append(DraftCapacity())
        if self.states is not None:
            parts.append(StateCapacity(len(self.states.snapshots), 1000))
        if self.tiers is not None:
            parts.append(self.tiers.capacity)
        return ReplicaCapacity(
            num_blocks=self.num_blocks,
            block_size=self._config.block_size,
            max_model_len=self._max_model_len,
            vocab_size=model.VOCAB_SIZE,
            device="simulated",
            weight_version=self.weights.version,
            max_batch_size=self.max_batch_size,
            exact=True,
            parts=tuple(parts),
        )

    def part(self, kind: type) -> Any:
        return self._parts[kind]

    def find(self, kind: type) -> Any:
        return self._parts.get(kind)

    def reset(self) -> None:
        self._blocked = None
        self._sequences.clear()
        self._last_step = 0
        if self.states is not None:
            self.states.reset()
        if self.tiers is not None:
            self.tiers.reset()

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()

    @staticmethod
    def duration_ns(plan: StepPlan) -> int:
        """Return the device time of a step."""
        return STEP_NS + TOKEN_NS * sum(plan.num_tokens)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a plan, as `ExecutorCore.execute`.

        Raises:
            LostPlan: The plan before is missing.
            WrongKV: A row's blocks hold other KV than its tokens'.
            FatalRequest: A row is of such a request.
        """
        if self._blocked is not None:
            raise self._blocked
        if plan.step_id != self._last_step + 1:
            raise LostPlan(f"plan {plan.step_id} comes after plan {self._last_step}")
        self._last_step = plan.step_id
        end_ns = self._now_ns()
        start_ns = end_ns - self.duration_ns(plan)
        self._apply(plan)
        version, number = self._weights_in_place()
        rows: list[tuple[int, int, float, str, int]] = []
        drafts: list[VerifiedDraft] = []
        source: _Sequence | None = None
        ran: set[int] = set()
        planned = read(plan)
        allowed = planned.num_drafts or repeat(0)
        for seq_id, count, most in zip(plan.seq_ids, plan.num_tokens, allowed, strict=False):
            sequence = self._sequences[seq_id]
            if sequence.finished or sequence.generated >= sequence.new.sampling.max_tokens:
                continue
            if sequence.new.info.request_id in self._fatal:
                raise FatalRequest(sequence.new.info.request_id)
            ran.add(seq_id)
            kind = self._kind_of(sequence, number)
            if count:
                self._compute(sequence, count, kind)
                source = sequence
            elif source is None or source.chain[: sequence.length + 1] != sequence.chain:
                raise WrongKV(f"sequence {seq_id} shares the prefill of other tokens")
            elif self.states is not None:
                self.states.share(seq_id, source.new.seq_id)
            if sequence.computed == sequence.length:
                adapter = self._adapter_of(sequence)[0]
                sampled, draft = self._sample(sequence, kind, most)
                rows += [(seq_id, *each, adapter) for each in sampled]
                drafts += draft
        if self.states is not None:
            self.states.save(plan, ran)
        if planned.kv_offers:
            assert self.tiers is not None
            self.tiers.offer(planned.kv_offers, plan.step_id)
        seq_ids, tokens, logprobs, reasons, versions = (
            zip(*rows, strict=True) if rows else ((),) * 5
        )
        parts: list[Section] = []
        if any(versions):
            parts.append(AdaptersResult(versions))
        if planned.num_drafts:
            parts.append(DraftsResult(tuple(drafts), plan.step_id % 3))
        return StepResult(
            step_id=plan.step_id,
            started=started_sequences(plan, start_ns),
            seq_ids=seq_ids,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reasons=reasons,
            ended=plan.ended,
            weight_version=version,
            start_ns=start_ns,
            end_ns=end_ns,
            parts=tuple(parts),
        )

    def _apply(self, plan: StepPlan) -> None:
        planned = read(plan)
        try:
            self.weights.finish_planned_sync(planned.weight_version)
        except WeightsError as error:
            self._blocked = error
            raise
        for seq_id in plan.finished:
            self._sequences.pop(seq_id, None)
        for adapter, version in planned.adapters:
            self.adapters.switch(adapter, version)
        for new in plan.new:
            if new.seq_id in self._sequences:
                raise WrongKV(f"sequence {new.seq_id} is new, and was not finished")
            self._sequences[new.seq_id] = _Sequence(new)
            self._note_request(new.sampling.seed, new.info.request_id)
        for seq_id, block_ids in plan.grown:
            self._sequences[seq_id].table += block_ids
        if planned.kv_moves:
            assert self.tiers is not None
            self.tiers.apply(planned.kv_moves)
        for source, destination in plan.copies:
            hashes, kinds = self._blocks[source]
            self._blocks[destination] = list(hashes), list(kinds)
        number = self._weights_in_place()[1] if plan.new else 0
        for new in plan.new:
            sequence = self._sequences[new.seq_id]
            kind = self._kind_of(sequence, number)
            if new.num_cached < sequence.length:  # else it takes the logits of the row before
                # KV of former weights is for sequences that began with them.
                self._check(sequence, new.num_cached, kind)
            # A state of other tokens shows in the tokens that it gives.
            if self.states is not None and not self.states.start(new).kinds <= {kind}:
                raise WrongKV(f"sequence {new.seq_id} begins in a state of other weights")

    def _adapter_of(self, sequence: _Sequence) -> tuple[int, int]:
        """Return the version of a sequence's adapter, and the number that it consists of."""
        id = sequence.new.info.adapter
        if not id:
            return 0, 0
        adapter = self.adapters.get(id)
        if adapter is None:
            raise WrongKV(f"sequence {sequence.new.seq_id} has the unknown adapter {id!r}")
        return adapter.version, model.number_of(adapter.folder)

    def _kind_of(self, sequence: _Sequence, number: int) -> tuple[int, int]:
        """Return what computes a sequence's KV now: the numbers of weights and adapter."""
        return number, self._adapter_of(sequence)[1]

    def _compute(self, sequence: _Sequence, count: int, kind: tuple[int, int]) -> None:
        """Write the next positions' KV, and read all before."""
        stop = sequence.computed + count
        if stop > sequence.length:
            raise WrongKV(f"sequence {sequence.new.seq_id} has no token at {sequence.length}")
        self._write(sequence, sequence.chain[sequence.computed + 1 : stop + 1], kind)
        if self.states is not None:
            tokens = sequence.tokens[sequence.computed : stop]
            self.states.compute(sequence.new.seq_id, sequence.computed, tokens, kind)
        sequence.computed = stop
        self._check(sequence, stop, None)

    def _write(self, sequence: _Sequence, hashes: list[int], kind: tuple[int, int]) -> None:
        """Write KV after the computed tokens."""
        size, table = self._config.block_size, sequence.table
        for position, each in enumerate(hashes, sequence.computed):
            block, offset = divmod(position, size)
            slots, kinds = self._blocks[table[block]]
            slots[offset], kinds[offset] = each, kind

    def _check(self, sequence: _Sequence, stop: int, kind: tuple[int, int] | None) -> None:
        """Check the KV of the first positions; with `kind`, that it is of these weights."""
        size, chain = self._config.block_size, sequence.chain
        for start, block_id in zip(range(0, stop, size), sequence.table, strict=False):
            hashes, kinds = self._blocks[block_id]
            end = start + size
            if end > stop:
                end = stop
                hashes, kinds = hashes[: stop - start], kinds[: stop - start]
            if hashes != chain[start + 1 : end + 1]:
                raise WrongKV(
                    f"sequence {sequence.new.seq_id} of {sequence.new.info.request_id} reads block "
                    f"{block_id}, which holds other tokens"
                )
            if kind is not None and kinds.count(kind) != len(kinds):
                raise WrongKV(
                    f"sequence {sequence.new.seq_id} of {sequence.new.info.request_id} begins with "
                    f"block {block_id} of weights and adapter {kinds}, not {kind}"
                )

    def _weights_in_place(self) -> tuple[int, int]:
        """Return the version of the weights, and the number that they consist of."""
        if self._in_place[0] != self.weights.version:
            self._in_place = self.weights.version, int(self._module.weight.item())
            self._note_weights(*self._in_place)
        return self._in_place

    def _sample(
        self, sequence: _Sequence, kind: tuple[int, int], most_drafts: int
    ) -> tuple[list[tuple[int, float, str]], list[VerifiedDraft]]:
        """Sample a token, and after it those that right drafts give.

        Drafted tokens' KV is written like that of others, also of those that turn out to be wrong.
        """
        before = sequence.chain[-1]
        num_drafts = before % (most_drafts + 1)
        num_right = (before >> 8) % (num_drafts + 1)
        sampled = [self._next(sequence, kind)]
        while len(sampled) <= num_right and not sequence.finished:
            self._write(sequence, [sequence.chain[-1]], kind)
            if self.states is not None:
                token = int(sequence.tokens[-1])
                self.states.go_on(sequence.new.seq_id, sequence.computed, token, kind)
            sequence.computed += 1
            sampled.append(self._next(sequence, kind))
        if not num_drafts:
            return sampled, []
        wrong = num_drafts - len(sampled) + 1
        self._write(sequence, [-1] * wrong, kind)
        draft = VerifiedDraft(sequence.new.seq_id, "model", num_drafts, len(sampled) - 1)
        return sampled, [draft]

    def _next(self, sequence: _Sequence, kind: tuple[int, int]) -> tuple[int, float, str]:
        sampling = sequence.new.sampling
        early = sequence.generated < sampling.min_tokens
        avoided = sampling.stop_token_ids if early else ()
        allowed = sequence.constrained.allowed() if sequence.constrained is not None else ()
        chain = sequence.chain[-1]
        if self.states is not None:
            chain = self.states.chain(sequence.new.seq_id)
        token, logprob = model.sample(chain, sequence.seed, kind, avoided, allowed)
        sequence.append(token)
        reason = ""
        if token in sampling.stop_token_ids:
            reason = "stop"
        elif sequence.generated == sampling.max_tokens:
            reason = "length"
        sequence.finished = bool(reason)
        return token, logprob, reason
