"""The executor: does what the plan says, and reports tokens, logprobs and finish."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...bus.messages import (
    LaneCapacity,
    NewSequence,
    PromptLogprobs,
    StartedSequence,
    StepPlan,
    StepResult,
    TopLogprobs,
)
from ...config import EngineConfig
from .adjust import adjust_logits
from .batch import IntArray, Rows, flatten_rows, order_rows
from .deterministic import Determinism
from .inputs import InputBuilder, StepInputs, model_forward
from .kernels.compile import KernelsUnavailable
from .kernels.modules import FastModules, find_fast_modules
from .kv_cache import KVCache, count_blocks
from .logprobs import gather_logprobs
from .model import LoadedModel, load_model
from .report import report_top_logprobs, score_prompts
from .sampling import sample_with_logprobs, uniforms
from .sequences import BoolArray, SequenceTable
from .weights import WeightSyncManager

Reason = Literal["", "stop", "length"]


class Sampled(msgspec.Struct, frozen=True):
    """The part of a StepResult that is about tokens, `[rows]` each."""

    seq_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reasons: tuple[Reason, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


class ExecutorCore:
    """Owns the model, the KV tensors, and what is known of each sequence.

    Loading happens in the constructor. All methods run on one thread and block while the device
    works. An error in `execute` leaves the object in an undefined state: `reset` it, or
    `clear` it when it was a ModelError.

    Attributes:
        fast_modules: The modules that run with our kernels; None when none do.
        without_kernels: Why the model runs without our kernels; empty when it runs with them.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        model: LoadedModel | None = None,
    ) -> None:
        """Loads the model and allocates the cache.

        Args:
            config: What to run.
            now_ns: The clock for `start_ns` and `end_ns`.
            model: Taken instead of the one that the configuration names.

        Raises:
            ModelError: The model can't be loaded, the cache does not fit, or deterministic mode is
                wanted and not possible.
        """
        self.model = load_model(config) if model is None else model
        self.cache = KVCache(self.model, count_blocks(config, self.model), config.block_size)
        self.weights = WeightSyncManager(self.model.module)
        self._now_ns = now_ns
        self._raw_logprobs = config.logprobs_mode == "raw"
        # Sequences that finished linger until the plans say so, hence some more rows than run.
        rows = config.max_batch_size + 16
        self._table = SequenceTable(rows, self.model.max_model_len, config.block_size)
        self._builder = InputBuilder(
            self.model, config.block_size, deterministic=config.deterministic
        )
        self.fast_modules: FastModules | None = None
        self.without_kernels = ""
        self._determinism: Determinism | None = None
        if config.deterministic:
            self.without_kernels = "deterministic mode has its own"
            self._determinism = Determinism(self.model, self.cache, self._builder)
            self._determinism.check()
        elif config.kernels == "auto":
            try:
                self.fast_modules = find_fast_modules(self.model, self.cache, self._builder)
            except KernelsUnavailable as error:
                self.without_kernels = str(error)
        else:
            self.without_kernels = "engine.kernels is off"

    def capacity(self) -> LaneCapacity:
        """What this lane can hold."""
        device = self.model.device
        name = str(device)
        if device.type == "cuda":
            name = f"{name} {torch.cuda.get_device_name(device)}"
        return LaneCapacity(
            num_blocks=self.cache.num_blocks,
            block_size=self.cache.block_size,
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            device=name,
        )

    def set_threads(self, number: int) -> None:
        """Sets torch's threads, for the whole process.

        Raises:
            ModelError: Deterministic mode does not hold with so many.
        """
        if number != torch.get_num_threads():
            torch.set_num_threads(number)
            if self._determinism is not None:
                self._determinism.check()

    def reset(self) -> None:
        """Forgets all sequences. The KV tensors stay as they are."""
        self._table.clear()

    def clear(self) -> None:
        """Forgets all sequences and all KV, which after a ModelError may be no numbers.

        They would spoil whoever gets their blocks, also where he may not look: 0 * NaN is NaN.
        """
        self.reset()
        self.cache.clear()

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one plan.

        Rows of sequences that finished in an earlier step are left out: batching plans one step
        ahead and could not know.

        Raises:
            ValueError: The plan contradicts what came before: an unknown sequence, more tokens
                than are known, positions without blocks.
            ModelError: The model's output is broken.
        """
        start_ns = self._now_ns()
        self._apply(plan)
        rows, num_tokens = self._select(plan)
        step = self._step if self._determinism is None else self._determinism.wrap(self._step)
        sampled, prompts = step(rows, num_tokens) if rows.size else (Sampled(), ())
        return StepResult(
            step_id=plan.step_id,
            started=tuple(_started(new, plan.made_ns, start_ns) for new in plan.new),
            seq_ids=sampled.seq_ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reasons=sampled.finish_reasons,
            ended=plan.ended,
            weight_version=self.weights.version,
            start_ns=start_ns,
            end_ns=self._now_ns(),
            top_logprobs=sampled.top_logprobs,
            prompt_logprobs=prompts,
        )

    # --- inside -------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Takes over what changed. Finished first: a preempted sequence may come back at once."""
        for seq_id in plan.finished:
            self._table.remove(seq_id)
        for new in plan.new:
            self._table.add(new)
        try:
            for seq_id, block_ids in plan.grown:
                self._table.append_blocks(seq_id, block_ids)
        except KeyError as error:
            raise ValueError(f"the plan grows sequence {error}, which is unknown") from None
        self.cache.copy_blocks(plan.copies)

    def _select(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Table rows and token counts of the sequences that still run, in the plan's order."""
        try:
            rows = self._table.rows_of(plan.seq_ids)
        except KeyError as error:
            raise ValueError(f"the plan names sequence {error}, which is unknown") from None
        num_tokens = np.array(plan.num_tokens, np.int64)
        running = ~self._table.finished[rows]
        return rows[running], num_tokens[running]

    @torch.inference_mode()
    def _step(
        self, rows: IntArray, num_tokens: IntArray
    ) -> tuple[Sampled, tuple[PromptLogprobs, ...]]:
        table = self._table
        ends = table.num_computed[rows] + num_tokens
        room = table.num_blocks[rows] * self.cache.block_size
        bad = (num_tokens < 1) | (ends > table.num_known[rows]) | (ends > room)
        if bad.any():
            self._complain(int(rows[bad][0]), int(num_tokens[bad][0]))
        samples = ends == table.num_known[rows]
        num_scored = table.num_to_score(rows, num_tokens)
        inputs = self._inputs(rows, num_tokens, samples, num_scored)
        with self.fast_modules.active() if self.fast_modules else nullcontext():
            logits = model_forward(self.model.module, inputs, self.cache)
        num_samples = int(samples.sum())
        prompts = score_prompts(
            logits[num_samples:],
            table,
            rows,
            num_scored,
            raw=self._raw_logprobs,
            kernels=self.fast_modules is not None,
        )
        table.num_computed[rows] = ends
        if not num_samples:
            return Sampled(), prompts
        return self._sample(logits[:num_samples], rows[samples]), prompts

    def _inputs(
        self, rows: IntArray, num_tokens: IntArray, samples: BoolArray, num_scored: IntArray
    ) -> StepInputs:
        """A pass whose logits are those of rows that sample, then those of prompts to score."""
        table = self._table
        starts = table.num_computed[rows]
        order, num_decodes = order_rows(starts, num_tokens)
        rows, starts, counts = rows[order], starts[order], num_tokens[order]
        width = -(-int((starts + counts).max()) // self.cache.block_size)
        row_of_token, positions = flatten_rows(starts, counts)
        input_ids = table.tokens[rows[row_of_token], positions]
        # Logits come back in the plan's order, not in that of the batch.
        last_token = np.empty_like(order)
        last_token[order] = np.cumsum(counts) - 1
        batch_rows = Rows(starts, counts, table.blocks[rows, :width], num_decodes)
        logits_index = last_token[samples]
        if num_scored.any():
            first_token = last_token - num_tokens + 1
            _, scored = flatten_rows(first_token, num_scored)
            logits_index = np.concatenate((logits_index, scored))
        return self._builder.build(batch_rows, input_ids, logits_index)

    def _sample(self, model_logits: torch.Tensor, rows: IntArray) -> Sampled:
        """Chooses a token for each row, and reports it in the configured mode."""
        table = self._table
        device = model_logits.device
        kernels = self.fast_modules is not None

        def upload(array: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        logits = adjust_logits(model_logits, table, rows)
        temperatures = upload(table.temperature[rows])
        top_k, top_p, min_p = table.top_k[rows], table.top_p[rows], table.min_p[rows]
        tokens, logprobs = sample_with_logprobs(
            logits,
            temperatures,
            uniforms=upload(uniforms(table.seed[rows], table.num_generated[rows])),
            top_k=upload(top_k) if top_k.any() else None,
            top_p=upload(top_p) if (top_p < 1).any() else None,
            min_p=upload(min_p) if min_p.any() else None,
            kernels=kernels,
        )
        if self._raw_logprobs:
            logits, temperatures = model_logits, torch.ones_like(temperatures)
            logprobs = gather_logprobs(logits, temperatures, tokens[:, None], kernels=kernels)[:, 0]
        counts = table.num_logprobs[rows]
        tops = report_top_logprobs(logits, temperatures, counts, kernels=kernels)
        return self._record(rows, tokens.cpu().numpy(), logprobs.cpu().numpy(), tops)

    def _record(
        self,
        rows: IntArray,
        tokens: IntArray,
        logprobs: npt.NDArray[np.float32],
        top_logprobs: tuple[TopLogprobs, ...],
    ) -> Sampled:
        table = self._table
        table.append_tokens(rows, tokens)
        token_ids = tuple(tokens.tolist())
        at_limit = (table.num_generated[rows] >= table.max_tokens[rows]).tolist()
        reasons: list[Reason] = []
        for row, token, full in zip(rows.tolist(), token_ids, at_limit, strict=True):
            reason: Reason = "length" if full else ""
            if token in table.stop_ids[row]:
                reason = "stop"
            reasons.append(reason)
        table.finished[rows] = [bool(reason) for reason in reasons]
        return Sampled(
            seq_ids=table.ids_of(rows),
            token_ids=token_ids,
            logprobs=tuple(logprobs.tolist()),
            finish_reasons=tuple(reasons),
            top_logprobs=top_logprobs,
        )

    def _complain(self, row: int, num_tokens: int) -> None:
        table = self._table
        (seq_id,) = table.ids_of(np.array([row]))
        raise ValueError(
            f"the plan computes {num_tokens} tokens of sequence {seq_id}, which has "
            f"{table.num_computed[row]} computed, {table.num_known[row]} known and "
            f"{table.num_blocks[row]} blocks"
        )


def _started(new: NewSequence, planned_ns: int, executed_ns: int) -> StartedSequence:
    return StartedSequence(
        seq_id=new.seq_id,
        sample_index=new.sample.sample_index,
        num_cached=new.num_cached,
        num_generated=new.num_generated,
        info=new.info,
        planned_ns=planned_ns,
        executed_ns=executed_ns,
    )
