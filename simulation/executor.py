"""The executor's core with the model of hashes, and KV memory that finds a wrong block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..bus.control import ReplicaCapacity
from ..bus.messages import NewSequence, StepPlan, StepResult
from ..config import EngineConfig
from ..stages.executor.driver.step import started_sequences
from ..stages.executor.runner.weights.sync_manager import WeightSyncManager
from ..stages.executor.runner.weights.transports import WeightGroups
from . import model

STEP_NS, TOKEN_NS = 1_500_000, 20_000
"""Device time of a step, and of each of its tokens."""


class WrongKV(Exception):
    """A step would read KV of other tokens, or of other weights."""


class LostPlan(ValueError):
    """A plan builds on one that has not come."""


class _Sequence:
    """A sequence: its tokens, the hash at each, its blocks."""

    def __init__(self, new: NewSequence) -> None:
        self.new = new
        self.chain = [model.begin(new.cache_scope)]
        for token in new.token_ids:
            self.chain.append(model.extend(self.chain[-1], token))
        self.length = len(new.token_ids)
        self.table = list(new.block_ids)
        self.computed = new.num_cached
        self.generated = new.num_generated
        self.finished = False
        sampling = new.sampling
        self.seed = 0 if sampling.temperature == 0 else new.sample.seed

    def append(self, token: int) -> None:
        self.chain.append(model.extend(self.chain[-1], token))
        self.length += 1
        self.generated += 1


class SimulatedExecutor:
    """`ExecutorCore` for the simulation: real plans, weights and results; no tensors.

    A slot of KV holds the hash of all tokens up to its own, and the version of the weights. Each
    step reads all slots of its rows.
    """

    def __init__(
        self,
        config: EngineConfig,
        now_ns: Callable[[], int],
        num_blocks: int,
        max_batch_size: int,
        max_model_len: int,
        note_weights: Callable[[int, int], object],
    ) -> None:
        """Args:
        config: The settings.
        now_ns: The clock.
        num_blocks, max_batch_size, max_model_len: Of the device and the model.
        note_weights: Called with the version and the number of weights that are in place.
        """
        self._config = config
        self._note_weights = note_weights
        self._now_ns = now_ns
        self._max_model_len = max_model_len
        self.max_batch_size = max_batch_size
        self.num_blocks = num_blocks
        size = config.block_size
        self._slots = [[0] * size for _ in range(num_blocks)]
        self._versions = [[-1] * size for _ in range(num_blocks)]
        self._sequences: dict[int, _Sequence] = {}
        self._last_step = 0
        self._module = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self._module.weight.zero_()
        self.weights, self.weight_groups = WeightSyncManager(self._module), WeightGroups()
        self._in_place = (0, 0)
        # Parts of the real core that the shell reads.
        device = torch.device("cpu")
        self.model = SimpleNamespace(layers=(), device=device)
        self.runner = SimpleNamespace(backend=SimpleNamespace(name="simulated"))
        self.off = {"kernels": "simulated", "graphs": "", "speculation": "", "deterministic": ""}
        self.ranks = self.tiers = self.draft_model = None
        self.expert_owners: list[int] = []
        self.adapters = _NoAdapters()
        self.memory = SimpleNamespace(lacks=(), pending=())
        self.constraints = SimpleNamespace(take_waits_ns=lambda: ())
        self.runs_ahead = False

    def capacity(self) -> ReplicaCapacity:
        return ReplicaCapacity(
            num_blocks=self.num_blocks,
            block_size=self._config.block_size,
            max_model_len=self._max_model_len,
            vocab_size=model.VOCAB_SIZE,
            device="simulated",
            weight_version=self.weights.version,
            max_batch_size=self.max_batch_size,
            drafts=False,
            exact=True,
        )

    def facts(self) -> dict[str, int | float | str]:
        return {}

    def reset(self) -> None:
        self.weights.start_over()
        self._sequences.clear()
        self._last_step = 0

    def close(self) -> None:
        """Nothing is held."""

    @staticmethod
    def duration_ns(plan: StepPlan) -> int:
        """Return the device time of a step."""
        return STEP_NS + TOKEN_NS * sum(plan.num_tokens)

    def execute(self, plan: StepPlan, images: Mapping[str, Any] | None = None) -> StepResult:
        """Run a plan, as `ExecutorCore.execute`.

        Raises:
            LostPlan: The plan before is missing.
            WrongKV: A row's blocks hold other KV than its tokens'.
        """
        if plan.step_id != self._last_step + 1:
            raise LostPlan(f"plan {plan.step_id} comes behind plan {self._last_step}")
        self._last_step = plan.step_id
        end_ns = self._now_ns()
        start_ns = end_ns - self.duration_ns(plan)
        self._apply(plan)
        version, number = self._weights_in_place()
        rows: list[tuple[int, int, float, str]] = []
        source: _Sequence | None = None
        for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
            sequence = self._sequences[seq_id]
            if sequence.finished or sequence.generated >= sequence.new.sampling.max_tokens:
                continue
            if count:
                self._compute(sequence, count, version)
                source = sequence
            elif source is None or source.chain[: sequence.length + 1] != sequence.chain:
                raise WrongKV(f"sequence {seq_id} shares the prefill of other tokens")
            if sequence.computed == sequence.length:
                rows.append((seq_id, *self._sample(sequence, number)))
        seq_ids, tokens, logprobs, reasons = zip(*rows, strict=True) if rows else ((),) * 4
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
        )

    def _apply(self, plan: StepPlan) -> None:
        self.weights.finish_planned_sync(plan.weight_version)
        for seq_id in plan.finished:
            self._sequences.pop(seq_id, None)
        for new in plan.new:
            if new.seq_id in self._sequences:
                raise WrongKV(f"sequence {new.seq_id} is new, and was not finished")
            self._sequences[new.seq_id] = _Sequence(new)
        for seq_id, block_ids in plan.grown:
            self._sequences[seq_id].table += block_ids
        for source, destination in plan.copies:
            self._slots[destination] = list(self._slots[source])
            self._versions[destination] = list(self._versions[source])
        for new in plan.new:
            sequence = self._sequences[new.seq_id]
            if new.num_cached < sequence.length:  # else it takes the logits of the row before
                # KV of former weights is for sequences that began with them.
                self._check(sequence, new.num_cached, self.weights.version)

    def _compute(self, sequence: _Sequence, count: int, version: int) -> None:
        """Write the next positions' KV, and read all before."""
        start, size = sequence.computed, self._config.block_size
        stop = start + count
        if stop > sequence.length:
            raise WrongKV(f"sequence {sequence.new.seq_id} has no token at {sequence.length}")
        for position in range(start, stop):
            block, offset = divmod(position, size)
            block_id = sequence.table[block]
            self._slots[block_id][offset] = sequence.chain[position + 1]
            self._versions[block_id][offset] = version
        sequence.computed = stop
        self._check(sequence, stop, None)

    def _check(self, sequence: _Sequence, stop: int, version: int | None) -> None:
        """Check the KV of the first positions; with `version`, of these weights."""
        size, chain = self._config.block_size, sequence.chain
        for start in range(0, stop, size):
            block_id = sequence.table[start // size]
            count = min(size, stop - start)
            if self._slots[block_id][:count] != chain[start + 1 : start + 1 + count]:
                raise WrongKV(
                    f"sequence {sequence.new.seq_id} of {sequence.new.info.request_id} reads block "
                    f"{block_id}, which holds other tokens"
                )
            if version is not None and self._versions[block_id][:count] != [version] * count:
                raise WrongKV(
                    f"sequence {sequence.new.seq_id} of {sequence.new.info.request_id} begins with "
                    f"block {block_id} of weights {self._versions[block_id][0]}, not {version}"
                )

    def _weights_in_place(self) -> tuple[int, int]:
        """Return the version of the weights, and the number that they consist of."""
        if self._in_place[0] != self.weights.version:
            self._in_place = self.weights.version, int(self._module.weight.item())
            self._note_weights(*self._in_place)
        return self._in_place

    def _sample(self, sequence: _Sequence, weights: int) -> tuple[int, float, str]:
        sampling = sequence.new.sampling
        early = sequence.generated < sampling.min_tokens
        avoided = sampling.stop_token_ids if early else ()
        token, logprob = model.sample(sequence.chain[-1], sequence.seed, weights, avoided)
        sequence.append(token)
        reason = ""
        if token in sampling.stop_token_ids:
            reason = "stop"
        elif sequence.generated == sampling.max_tokens:
            reason = "length"
        sequence.finished = bool(reason)
        return token, logprob, reason


class _NoAdapters:
    """The table of adapters, which is empty."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())

    def describe(self) -> tuple[()]:
        return ()
