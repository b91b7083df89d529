"""The executor: does what the plan says, and reports tokens, logprobs and finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch

from ...bus.control import LaneCapacity
from ...bus.messages import (
    NewSequence,
    PromptLogprobs,
    StartedSequence,
    StepPlan,
    StepResult,
    TopLogprobs,
)
from ...config import EngineConfig
from ..grammar import GrammarCompiler
from .attention.backend import AttentionBackend
from .attention.choose import choose_backend
from .attention.paged import PagedBackend
from .batch import IntArray, Rows, Uploader, flatten_rows, order_rows
from .choose import choose_tokens, packed_sampling
from .constraints import Constraints, TokenMasks
from .cuda_graphs import CudaCapture
from .deterministic import Determinism
from .fast_modules.modules import FastModules
from .feed import TokenFeed
from .graphs import Capture, DecodeGraphs, DecodeStep
from .inputs import InputBuilder, StepInputs, model_forward
from .kv_cache import KVCache, count_blocks
from .loaded_model import LoadedModel
from .memory import LaneMemory, no_memory
from .model import load_model
from .report import score_prompts
from .sampling import sample_plain
from .sequences import BoolArray, SequenceTable
from .unread import LaunchedStep, Sampled, SampledRows, UnreadTokens
from .weights import WeightSyncManager, limits_of


class ExecutorCore:
    """Owns the model, the KV tensors, and what is known of each sequence.

    Loading happens in the constructor. All methods run on one thread and block while the device
    works. An error in one leaves the object in an undefined state: `reset` it, or `clear` it when
    it was a ModelError.

    `execute` runs a plan. Where `runs_ahead`, the next plan may be launched before the result of
    the one before is read: `launch` each plan, `finish` each launched step, both in order. Then
    the next step takes the tokens on the device, and a row whose sequence turns out to have
    stopped is thrown away. A sequence that comes back under its id must be in no step that is
    launched and not finished.

    Attributes:
        max_batch_size: `engine.max_batch_size`, its default worked out.
        runs_ahead: Whether steps may be launched before those before them are finished: on CUDA.
        backend: Computes attention.
        graphs: The recorded decode steps; None when there are none.
        without_graphs: Why there are none; empty when there are.
        fast_modules: The modules that run with our kernels; None when none do.
        without_kernels: Why the model runs without our kernels; empty when it runs with them.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        model: LoadedModel | None = None,
        backend: AttentionBackend[Any] | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """Loads the model and allocates the cache.

        Args:
            config: What to run.
            now_ns: The clock for `start_ns` and `end_ns`.
            model: Taken instead of the one that the configuration names.
            backend: Taken instead of the one that fits model and machine.
            num_blocks: Of the cache; as many as memory allows when None.

        Raises:
            ModelError: The model can't be loaded, the cache does not fit, or deterministic mode is
                wanted and not possible.
        """
        self.model = load_model(config) if model is None else model
        self.max_batch_size = config.batch_size_on(self.model.device.type)
        config = msgspec.structs.replace(config, max_batch_size=self.max_batch_size)
        num_blocks = num_blocks or count_blocks(config, self.model)
        self.cache = KVCache(self.model, num_blocks, config.block_size)
        self.weights = WeightSyncManager(
            self.model.module,
            limits_of(self.model.module, config.max_weight_tensors, config.max_weight_bytes),
        )
        self.memory = LaneMemory(self.cache, self.weights)
        self._now_ns = now_ns
        self._raw_logprobs = config.logprobs_mode == "raw"
        # Sequences that finished linger until the plans say so, hence some more rows than run.
        rows = self.max_batch_size + 16
        self._table = SequenceTable(rows, self.model.max_model_len, config.block_size)
        given = None if backend is None else (backend, "another back end was given")
        self.backend, self.without_kernels = given or choose_backend(config, self.model)
        self._constraints = Constraints(
            self._table, GrammarCompiler(config.model_folder, self.model.vocab_size)
        )
        self._builder = InputBuilder(self.model, config.block_size, self.backend)
        self._upload = Uploader(self.model.device)
        self._feed = TokenFeed(rows, self.model.device)
        self._unread = UnreadTokens(self._table)
        self._capture: Capture | None = None
        self.runs_ahead = self.model.device.type == "cuda"
        self.graphs: DecodeGraphs | None = None
        self.without_graphs = ""
        self._make_modules_ready(config)
        self._record_at_load(config)

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
            weight_version=self.weights.version,
            lacks=self.memory.lacks,
            max_batch_size=self.max_batch_size,
        )

    def set_threads(self, number: int) -> None:
        """Sets torch's threads, for the whole process.

        Raises:
            ModelError: Deterministic mode does not hold with so many.
        """
        if number != torch.get_num_threads():
            torch.set_num_threads(number)
            self.check_determinism()

    def check_determinism(self) -> None:
        """Whether deterministic mode holds, if this is it; no sequence may be there.

        Raises:
            ModelError: It does not.
        """
        if self._determinism is not None:
            self._determinism.check()

    def record_graphs(self, capture: Capture) -> None:
        """Records the decode steps, which takes a PagedBackend, and uses them from then on.

        Raises:
            RuntimeError: The model's step can't be recorded.
        """
        assert isinstance(self.backend, PagedBackend)
        try:
            self.graphs = DecodeGraphs(
                self.model, self.backend, self.cache, self._feed, capture, self.max_batch_size
            )
        except RuntimeError as error:
            self.without_graphs = f"the model's step can't be recorded: {error}"
            raise
        self._capture = capture
        self.without_graphs = ""

    def resume_memory(self, tags: Collection[str]) -> None:
        """Takes memory again that was released; graphs are recorded again once all is there.

        Raises:
            WeightsError: As `LaneMemory.resume`.
        """
        self.memory.resume(tags)
        if self._capture is None or self.graphs is not None or self.memory.released:
            return
        try:
            self.record_graphs(self._capture)
        except RuntimeError as error:
            raise no_memory(error) from None

    def reset(self) -> None:
        """Forgets all sequences. The KV tensors stay as they are."""
        self._table.clear()
        self._unread.clear()
        self._constraints.clear()

    def clear(self) -> None:
        """Forgets all sequences and all KV, which after a ModelError may be no numbers.

        They would spoil whoever gets their blocks, also where he may not look: 0 * NaN is NaN.
        """
        self.reset()
        self.cache.clear()

    def close(self) -> None:
        """Gives up KV and model, whoever still holds this object; it is of no use then.

        A model that was given is the caller's again, as it was.
        """
        self._constraints.close()
        if self.fast_modules is not None:
            # Modules that hold a pass which holds them would wait for the garbage collector.
            self.fast_modules.remove()
        del self.model, self.weights, self.cache, self.memory
        del self.fast_modules, self.graphs, self._capture, self._determinism, self._within

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one plan.

        Rows of sequences that finished in an earlier step are left out: batching plans one step
        ahead and could not know.

        Raises:
            ValueError: The plan contradicts what came before: an unknown sequence, more tokens
                than are known, positions without blocks, rows while memory is released.
            ModelError: The model's output is broken.
        """
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts one plan; where `runs_ahead`, most steps are then still to be computed.

        Raises:
            ValueError: As `execute`.
            ModelError: As `execute`, if it shows already.
        """
        start_ns = self._now_ns()
        self._apply(plan)
        rows, num_tokens = self._select(plan)
        if rows.size and not self.memory.runs:
            raise ValueError(f"the plan has rows, and the lane lacks {self.memory.lacks}")
        with self._within():
            sampled, prompts = self._step(rows, num_tokens) if rows.size else (None, ())
        return LaunchedStep(
            plan, _started(plan, start_ns), self.weights.version, start_ns, sampled, prompts
        )

    def finish(self, step: LaunchedStep) -> StepResult:
        """The result of the oldest step that was launched; waits for it.

        A step from before a `reset` has no tokens any more.

        Raises:
            ModelError: The model's output is broken.
        """
        sampled = Sampled() if step.sampled is None else self._unread.read(step.sampled)
        return StepResult(
            step_id=step.plan.step_id,
            started=step.started,
            seq_ids=sampled.seq_ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reasons=sampled.finish_reasons,
            ended=step.plan.ended,
            weight_version=step.weight_version,
            start_ns=step.start_ns,
            end_ns=self._now_ns(),
            top_logprobs=sampled.top_logprobs,
            prompt_logprobs=step.prompts,
        )

    # --- inside -------------------------------------------------------------------------------

    def _make_modules_ready(self, config: EngineConfig) -> None:
        """For deterministic mode, or for our kernels."""
        self.fast_modules: FastModules | None = None
        self._determinism: Determinism | None = None
        # What a step runs in.
        self._within: Callable[[], AbstractContextManager[object]] = nullcontext
        if config.deterministic:
            self._determinism = Determinism(self.model, self.cache, self._builder)
            self._determinism.check()
            tiles = self._determinism.tiles
            self._within = lambda: tiles
        elif not self.without_kernels and self.model.device.type == "cpu":
            self.fast_modules = FastModules(self.model, self.cache, self._builder)
            self._within = self.fast_modules.active

    def _record_at_load(self, config: EngineConfig) -> None:
        if self.model.device.type != "cuda":
            self.without_graphs = "they are for CUDA"
        elif self.without_kernels:
            self.without_graphs = self.without_kernels
        elif config.cuda_graphs == "off":
            self.without_graphs = "engine.cuda_graphs is off"
        else:
            with suppress(RuntimeError):
                self.record_graphs(CudaCapture(self.model.device))

    def _apply(self, plan: StepPlan) -> None:
        """Takes over what changed. Finished first: a preempted sequence may come back at once."""
        if plan.weight_version > self.weights.version:
            self.weights.maybe_finish_sync()
        if self.memory.pending.intersection(plan.release):
            if self.graphs is not None:
                # They keep memory of their own, and addresses of what is released.
                self.graphs, self.without_graphs = None, "memory is released"
            self.memory.release(plan.release)
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
        if len(self._table.finished) > self._feed.rows:
            # Hand-made plans only: batching keeps to max_batch_size.
            self._feed.enlarge(len(self._table.finished))
            if self._capture is not None:
                self.record_graphs(self._capture)

    def _select(self, plan: StepPlan) -> tuple[IntArray, IntArray]:
        """Table rows and token counts of the sequences that still run, in the plan's order."""
        try:
            rows = self._table.rows_of(plan.seq_ids)
        except KeyError as error:
            raise ValueError(f"the plan names sequence {error}, which is unknown") from None
        num_tokens = np.array(plan.num_tokens, np.int64)
        # A sequence at its limit has finished, even when its last token has not been read.
        running = ~(self._table.finished[rows] | self._table.at_limit(rows))
        return rows[running], num_tokens[running]

    @torch.inference_mode()
    def _step(
        self, rows: IntArray, num_tokens: IntArray
    ) -> tuple[SampledRows | None, tuple[PromptLogprobs, ...]]:
        table = self._table
        if self._unread and table.adjusted[rows].any():
            # Penalties look at all tokens before the one to be sampled.
            self._unread.write()
        ends = table.num_computed[rows] + num_tokens
        room = table.num_blocks[rows] * self.cache.block_size
        bad = (num_tokens < 1) | (ends > table.num_known[rows]) | (ends > room)
        if bad.any():
            self._complain(int(rows[bad][0]), int(num_tokens[bad][0]))
        samples = ends == table.num_known[rows]
        masks = self._constraints.begin(rows[samples])
        num_scored = table.num_to_score(rows, num_tokens)
        if self.graphs and self.graphs.fits(num_tokens) and samples.all() and not num_scored.any():
            return self._replay(self.graphs, rows, masks), ()
        inputs = self._inputs(rows, num_tokens, samples, num_scored)
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
            return None, prompts
        return self._sample(logits[:num_samples], rows[samples], masks), prompts

    def _inputs(
        self, rows: IntArray, num_tokens: IntArray, samples: BoolArray, num_scored: IntArray
    ) -> StepInputs:
        """A pass whose logits are those of rows that sample, then those of prompts to score."""
        table = self._table
        starts = table.num_computed[rows]
        order, num_decodes = order_rows(starts, num_tokens)
        rows, starts, counts = rows[order], starts[order], num_tokens[order]
        width = -(-int((starts + counts).max()) // self.cache.block_size)
        batch_rows = Rows(starts, counts, table.blocks[rows, :width], num_decodes)
        row_of_token, positions = batch_rows.flat
        input_ids = table.tokens[rows[row_of_token], positions]
        # Logits come back in the plan's order, not in that of the batch.
        last_token = np.empty_like(order)
        last_token[order] = np.cumsum(counts) - 1
        logits_index = last_token[samples]
        if num_scored.any():
            first_token = last_token - num_tokens + 1
            _, scored = flatten_rows(first_token, num_scored)
            logits_index = np.concatenate((logits_index, scored))
        inputs = self._builder.build(batch_rows, input_ids, logits_index)
        if (input_ids < 0).any():
            inputs = replace(inputs, input_ids=self._feed.resolve(inputs.input_ids))
        return inputs

    def _replay(
        self, graphs: DecodeGraphs, rows: IntArray, masks: Future[TokenMasks] | None
    ) -> SampledRows:
        """A step in which every row computes its last token and samples the next."""
        table = self._table
        positions = table.num_computed[rows]
        width = int(positions.max()) // self.cache.block_size + 1
        step = DecodeStep(
            input_ids=table.tokens[rows, positions],
            positions=positions,
            tables=table.blocks[rows, :width],
            table_rows=rows,
            sampling=packed_sampling(table, rows),
        )
        logits, tokens, logprobs = graphs.run(step)
        table.num_computed[rows] += 1
        if not self._all_plain(rows):
            return self._sample(logits, rows, masks)
        return self._unread.add(rows, tokens, logprobs, (), fed=True)

    def _sample(
        self, model_logits: torch.Tensor, rows: IntArray, masks: Future[TokenMasks] | None
    ) -> SampledRows:
        """Chooses a token for each row, with what is reported of it in the configured mode."""
        table = self._table
        tops: tuple[TopLogprobs, ...] = ()
        if self.runs_ahead and self._all_plain(rows):
            packed = self._upload(*packed_sampling(table, rows))
            temperatures, numbers = (part.view(torch.float64) for part in packed)
            tokens, logprobs = sample_plain(model_logits, temperatures, numbers)
        else:
            kernels = self.fast_modules is not None
            tokens, logprobs, tops = choose_tokens(
                model_logits,
                table,
                rows,
                raw=self._raw_logprobs,
                kernels=kernels,
                masks=masks,
            )
        if self.runs_ahead:
            self._feed.put(self._upload(rows)[0], tokens)
        return self._unread.add(rows, tokens, logprobs, tops, fed=self.runs_ahead)

    def _all_plain(self, rows: IntArray) -> bool:
        """Whether `sample_plain` can choose the tokens, which waits for nothing."""
        return not self._raw_logprobs and bool(self._table.plain[rows].all())

    def _complain(self, row: int, num_tokens: int) -> None:
        table = self._table
        (seq_id,) = table.ids_of(np.array([row])).tolist()
        raise ValueError(
            f"the plan computes {num_tokens} tokens of sequence {seq_id}, which has "
            f"{table.num_computed[row]} computed, {table.num_known[row]} known and "
            f"{table.num_blocks[row]} blocks"
        )


def _started(plan: StepPlan, executed_ns: int) -> tuple[StartedSequence, ...]:
    """What is told of the sequences that are new in a plan: the prompt once for each request."""
    first = {new.info.entry_id: new.seq_id for new in reversed(plan.new)}
    return tuple(
        StartedSequence(
            seq_id=new.seq_id,
            sample_index=new.sample.sample_index,
            num_cached=new.num_cached,
            num_generated=new.num_generated,
            info=new.info,
            planned_ns=plan.made_ns,
            executed_ns=executed_ns,
            prompt_token_ids=_prompt(new) if first[new.info.entry_id] == new.seq_id else (),
        )
        for new in plan.new
    )


def _prompt(new: NewSequence) -> tuple[int, ...]:
    return new.token_ids[: len(new.token_ids) - new.num_generated]
