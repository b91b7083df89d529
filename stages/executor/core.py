"""The executor: does what the plan says, and reports tokens, logprobs and finish."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from ...bus.control import ReplicaCapacity
from ...bus.messages import (
    StepPlan,
    StepResult,
)
from ...config import EngineConfig, ModelError
from ...text.grammar import GrammarCompiler
from .driver.constraints import Constraints
from .driver.feed import TokenFeed
from .driver.pooling import PromptPooler, capabilities_of, embedding_capacity, report_pooled
from .driver.sequences import SequenceTable
from .driver.speculation.control import MOST_ROWS
from .driver.speculation.costs import StepCosts, measure_costs, trial_step
from .driver.speculation.draft_model import DraftModel, drafts_by_model, load_draft_model
from .driver.speculation.make import make_speculator
from .driver.speculation.speculator import Speculator
from .driver.started import started_sequences
from .driver.step import LaunchedStep, StepOutputs, StepRunner
from .driver.unread import Sampled, UnreadTokens
from .runner.adapters import AdapterLimits, AdapterTable
from .runner.attention.backend import AttentionBackend
from .runner.attention.choose import choose_backend
from .runner.attention.paged import PagedBackend
from .runner.batch import IntArray, Uploader
from .runner.cuda_graphs import CudaCapture
from .runner.deterministic import Determinism
from .runner.device import describe_device
from .runner.experts import experts_of
from .runner.fast_modules.modules import FastModules
from .runner.fixed_tiles import FixedTiles
from .runner.graphs import Capture, DecodeGraphs
from .runner.inputs import InputBuilder
from .runner.kv_cache import KVCache, count_blocks
from .runner.loaded_model import LoadedModel
from .runner.memory import ReplicaMemory, no_memory
from .runner.model import load_model
from .runner.weights import WeightSyncManager, limits_of


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
        without_speculation: Why no drafts are verified; empty when some may be.
        without_determinism: Why results depend on the batch; empty in deterministic mode.
        adapters: Those that sequences may have.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        now_ns: Callable[[], int] = time.time_ns,
        model: LoadedModel | None = None,
        backend: AttentionBackend[Any] | None = None,
        num_blocks: int | None = None,
        runs_ahead: bool | None = None,
    ) -> None:
        """Loads the model and allocates the cache.

        Args:
            config: What to run.
            now_ns: The clock for `start_ns` and `end_ns`.
            model: Taken instead of the one that the configuration names.
            backend: Taken instead of the one that fits model and machine.
            num_blocks: Of the cache; as many as memory allows when None.
            runs_ahead: Taken instead of what is best on the device.

        Raises:
            ModelError: The model can't be loaded, the cache does not fit, or deterministic mode is
                wanted and not possible.
        """
        self.model = load_model(config) if model is None else model
        self.max_batch_size = config.batch_size_on(self.model.device.type)
        config = msgspec.structs.replace(config, max_batch_size=self.max_batch_size)
        draft = load_draft_model(config, self.model) if drafts_by_model(config) else None
        num_blocks = num_blocks or count_blocks(config, self.model, draft)
        huge = config.huge_pages == "auto"
        self.cache = KVCache(self.model, num_blocks, config.block_size, huge_pages=huge)
        self.weights = WeightSyncManager(
            self.model.module,
            limits_of(self.model.module, config.max_weight_tensors, config.max_weight_bytes),
        )
        self._now_ns = now_ns
        # Sequences that finished linger until the plans say so, hence some more rows than run.
        rows = self.max_batch_size + 16
        self._table = SequenceTable(rows, self.model.max_model_len, config.block_size)
        self._draft_model = self._make_draft_model(config, draft)
        self.memory = self._make_memory(config)
        self._embedding, self._role = embedding_capacity(config, self.model), config.role
        given = None if backend is None else (backend, "another back end was given")
        self.backend, self.without_kernels = given or choose_backend(config, self.model)
        self._constraints = self._make_constraints(config)
        self._builder = InputBuilder(self.model, config.block_size, self.backend)
        self._feed = TokenFeed(rows, self.model.device)
        self._unread = UnreadTokens(self._table)
        self._capture: Capture | None = None
        self.runs_ahead = self.model.device.type == "cuda" if runs_ahead is None else runs_ahead
        self.graphs: DecodeGraphs | None = None
        self.without_graphs = ""
        self._make_modules_ready(config)
        in_order, most = not self.without_determinism, config.max_tokens_per_batch
        self._pooler = PromptPooler(self.model, self._table, most, in_order=in_order)
        self.adapters = self._make_adapters(config)
        self._record_at_load(config)
        self._speculator = self._make_speculator(config)
        self._runner = self._make_runner(config)

    def _make_draft_model(
        self, config: EngineConfig, draft: LoadedModel | None
    ) -> DraftModel | None:
        if draft is None:
            return None
        blocks, vocab_size = self.cache.num_blocks, self.model.vocab_size
        return DraftModel(config, draft, self._table, blocks, vocab_size)

    def _make_memory(self, config: EngineConfig) -> ReplicaMemory:
        return ReplicaMemory(
            self.cache,
            self.weights,
            draft_cache=self._draft_model.cache if self._draft_model else None,
            huge_pages=config.huge_pages == "auto",
        )

    def _make_constraints(self, config: EngineConfig) -> Constraints:
        compiler = GrammarCompiler(config.model_folder, self.model.vocab_size)
        if self.model.generates:
            compiler.make_ready()
        return Constraints(self._table, compiler, self._now_ns)

    def _make_speculator(self, config: EngineConfig) -> Speculator | None:
        if not self.model.generates:
            self.without_speculation = "the model generates nothing"
            return None
        if self.graphs is not None and config.speculation != "off":
            # A step with drafts is launched operation by operation, and what can be measured of
            # such steps says nothing of how long a recorded one takes.
            self.without_speculation = "steps are replayed as CUDA graphs"
            if self._draft_model is not None:
                raise ModelError(
                    "steps are replayed as CUDA graphs, beside which no draft model is asked; set "
                    "cuda_graphs to off, or draft_model_path to ''"
                )
            return None
        made = make_speculator(
            config, self._table, self._constraints, self._measure_costs, self._draft_model
        )
        self.without_speculation = "engine.speculation is off" if made is None else ""
        return made

    def _make_adapters(self, config: EngineConfig) -> AdapterTable:
        fast, determinism = self.fast_modules, self._determinism
        check = self._within if determinism is None else determinism.in_tiles
        alone: Callable[[], AbstractContextManager[object]] = nullcontext
        if fast is not None:
            alone = partial(fast.active, alone=True)
            if determinism is not None and fast.is_whole:
                alone = partial(determinism.in_tiles, alone=True)
        return AdapterTable(
            self.model,
            AdapterLimits(config.max_adapters, config.max_adapter_rank),
            one_by_one=config.deterministic is True,
            check=check,
            alone=alone,
        )

    def _measure_costs(self) -> StepCosts:
        kernels = self.fast_modules is not None
        step = trial_step(self.model, self.cache, self._builder, kernels=kernels)
        with self._within():
            longest = self.model.max_model_len
            return measure_costs(step, MOST_ROWS, self._now_ns, longest=longest)

    def _make_runner(self, config: EngineConfig) -> StepRunner:
        return StepRunner(
            model=self.model,
            cache=self.cache,
            table=self._table,
            builder=self._builder,
            upload=Uploader(self.model.device),
            adapters=self.adapters,
            pooler=self._pooler,
            constraints=self._constraints,
            feed=self._feed,
            unread=self._unread,
            speculator=self._speculator,
            raw_logprobs=config.logprobs_mode == "raw",
            kernels=self.fast_modules is not None,
            runs_ahead=self.runs_ahead,
        )

    @property
    def layer_kinds(self) -> Counter[str]:
        """How many layers look at all tokens before ("full"), how many at some ("sliding")."""
        return Counter("full" if spec.window is None else "sliding" for spec in self.model.layers)

    def capacity(self) -> ReplicaCapacity:
        """What this lane can hold."""
        return ReplicaCapacity(
            num_blocks=self.cache.num_blocks,
            block_size=self.cache.block_size,
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            device=describe_device(self.model.device),
            weight_version=self.weights.version,
            lacks=self.memory.lacks,
            max_batch_size=self.max_batch_size,
            adapters=self.adapters.told(),
            capabilities=capabilities_of(self.model, self._embedding, self._role),
            embedding=self._embedding,
            experts=experts_of(self.model.hf_config)[0],
            drafts=self._speculator is not None,
        )

    def set_threads(self, number: int) -> None:
        """Sets torch's threads, for the whole process; no sequence may be there.

        Raises:
            ModelError: Deterministic mode, if this is it, does not hold with so many.
        """
        if number != torch.get_num_threads():
            torch.set_num_threads(number)
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
            WeightsError: As `ReplicaMemory.resume`.
        """
        self.memory.resume(tags)
        if self._capture is None or self.graphs is not None or self.memory.released:
            return
        try:
            self.record_graphs(self._capture)
        except RuntimeError as error:
            raise no_memory(error) from None

    def switch_adapter(self, id: str, version: int) -> None:
        """As `AdapterTable.switch`, for the sequences that have it too; between two steps."""
        self._table.change_adapter(*self.adapters.switch(id, version))

    def reset(self) -> None:
        """Forgets all sequences. The KV tensors stay as they are."""
        self.weights.start_over()
        if self._speculator is not None:
            self._speculator.clear()
        self._table.clear()
        self._pooler.clear()
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
        if self._draft_model is not None:
            self._draft_model.close()
        del self.model, self.weights, self.cache, self.memory, self.adapters, self._pooler
        del self.fast_modules, self.graphs, self._capture, self._determinism, self._within
        del self._runner, self._speculator, self._draft_model

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one plan.

        Rows of sequences that finished in an earlier step are left out: batching plans one step
        ahead and could not know.

        Raises:
            ValueError: The plan contradicts what came before: an unknown sequence, more tokens
                than are known, positions without blocks, rows while memory is released.
            ModelError: The model's output is broken.
            WeightsError: No weights are in place, since the plan's could not be written; nothing
                of it was done, and until `reset` nothing is of those behind it.
        """
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts one plan; where `runs_ahead`, most steps are then still to be computed.

        Raises:
            ValueError: As `execute`.
            ModelError: As `execute`, if it shows already; or a WeightsError.
        """
        start_ns = self._now_ns()
        self._apply(plan)
        rows, num_tokens, num_drafts = self._select(plan)
        if rows.size and not self.memory.runs:
            raise ValueError(f"the plan has rows, and the lane lacks {self.memory.lacks}")
        with self._within():
            outputs = StepOutputs()
            if rows.size:
                outputs = self._runner.run(rows, num_tokens, num_drafts, self.graphs)
        started = started_sequences(plan, start_ns)
        return LaunchedStep(plan, started, self.weights.version, start_ns, outputs)

    def finish(self, step: LaunchedStep) -> StepResult:
        """The result of the oldest step that was launched; waits for it.

        A step from before a `reset` has no tokens any more.

        Raises:
            ModelError: The model's output is broken.
        """
        outputs, sampled = step.outputs, Sampled()
        if outputs.sampled is not None:
            sampled = self._unread.read(outputs.sampled)
            if self._speculator is not None:
                if not self.runs_ahead:
                    self._speculator.timed((self._now_ns() - step.start_ns) * 1e-9)
                self._speculator.observe(outputs.sampled, sampled.seq_ids, outputs.proposed)
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
            draft_rest=outputs.draft_rest,
            top_logprobs=sampled.top_logprobs,
            prompt_logprobs=outputs.prompts,
            adapter_versions=sampled.adapter_versions,
            pooled=report_pooled(outputs.pooled),
            failed=self._constraints.take_failures(),
            drafts=tuple(one for one in outputs.verified if one.seq_id in sampled.seq_ids),
        )

    def take_mask_waits_ns(self) -> list[int]:
        """As `Constraints.take_waits_ns`."""
        return self._constraints.take_waits_ns()

    def take_draft_failure(self) -> str:
        """Why the draft model drafts no more, once; empty where nothing has failed since."""
        model = self._draft_model
        if model is None or not model.failure:
            return ""
        failure, model.failure = model.failure, ""
        return failure

    # --- inside -------------------------------------------------------------------------------

    def _make_modules_ready(self, config: EngineConfig) -> None:
        """For deterministic mode, or for our kernels."""
        self.fast_modules: FastModules | None = None
        self._determinism: Determinism | None = None
        # What a step runs in.
        self._within: Callable[[], AbstractContextManager[object]] = nullcontext
        tiles = FixedTiles()
        if not self.without_kernels and self.model.device.type == "cpu":
            self.fast_modules = FastModules(self.model, self.cache, self._builder, tiles=tiles)
            self._within = self.fast_modules.active
        self.without_determinism = self._why_not_free(config)
        if self.without_determinism:
            return
        parts = (self.model, self.cache, self._builder)
        try:
            determinism = Determinism(*parts, self.fast_modules, tiles)
            determinism.check()
        except ModelError as error:
            if config.deterministic is True:
                raise
            self.without_determinism = error.message
            return
        self._determinism, self._within = determinism, determinism.active

    def _why_not_free(self, config: EngineConfig) -> str:
        """Why deterministic mode is not tried; empty where it is."""
        if config.deterministic != "auto":
            return "" if config.deterministic else "engine.deterministic is false"
        if self.fast_modules is None:
            return self.without_kernels or "it is for CPU"
        if not self.fast_modules.is_whole:
            return "kernels take the model in part"
        return ""

    def _record_at_load(self, config: EngineConfig) -> None:
        if self.model.device.type != "cuda":
            self.without_graphs = "they are for CUDA"
        elif not self.model.generates:
            self.without_graphs = "the model generates nothing"
        elif self.without_kernels:
            self.without_graphs = self.without_kernels
        elif config.cuda_graphs == "off":
            self.without_graphs = "engine.cuda_graphs is off"
        else:
            with suppress(RuntimeError):
                self.record_graphs(CudaCapture(self.model.device))

    def _apply(self, plan: StepPlan) -> None:
        """Takes over what changed. Finished first: a preempted sequence may come back at once."""
        self.weights.finish_planned_sync(plan.weight_version)
        if self.memory.pending.intersection(plan.release):
            if self.graphs is not None:
                # They keep memory of their own, and addresses of what is released.
                self.graphs, self.without_graphs = None, "memory is released"
            self.memory.release(plan.release)
            if self._draft_model is not None:
                self._draft_model.forget_kv()
        for seq_id in plan.finished:
            if self._speculator is not None:
                self._speculator.forget(seq_id)
            self._table.remove(seq_id)
            self._pooler.forget(seq_id)
        for adapter, version in plan.adapters:
            self.switch_adapter(adapter, version)
        for new in plan.new:
            self._table.add(new, self.adapters.slot_of(new.info.adapter))
            if self._speculator is not None:
                self._speculator.add(new.seq_id)
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

    def _select(self, plan: StepPlan) -> tuple[IntArray, IntArray, IntArray | None]:
        """Of the sequences that still run, in the plan's order, the table's rows, how many tokens
        they compute, and how many drafted ones they may."""
        try:
            rows = self._table.rows_of(plan.seq_ids)
        except KeyError as error:
            raise ValueError(f"the plan names sequence {error}, which is unknown") from None
        num_tokens = np.array(plan.num_tokens, np.int64)
        # A sequence at its limit has finished, even when its last token has not been read.
        running = ~(self._table.finished[rows] | self._table.at_limit(rows))
        num_drafts = np.array(plan.num_drafts, np.int64)[running] if plan.num_drafts else None
        return rows[running], num_tokens[running], num_drafts
