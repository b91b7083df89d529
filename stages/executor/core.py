"""The executor's core: driver and model runner, put together. It runs the plans of batching."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...bus.control import Cancel, ReplicaCapacity
from ...bus.media import MediaItem
from ...bus.parts.adapters import AdapterCapacity, AdaptersResult
from ...bus.parts.embeddings import PooledResult
from ...bus.parts.experts import ExpertCapacity
from ...bus.parts.images import ImagesResult, PromptMedia
from ...bus.parts.recipes import FingerprintCapacity
from ...bus.parts.scoring import PromptScores
from ...bus.parts.speculation import DraftCapacity, DraftsResult
from ...bus.sections import Section
from ...bus.steps import NewSequence, StepPlan, StepResult
from ...config import EngineConfig, ModelError, WeightsError, shown
from ...store.images import StoredImage
from ...text.grammar import GrammarCompiler
from .driver.choose import TokenChooser
from .driver.constraints import Constraints
from .driver.images import NO_IMAGES, SequenceImages
from .driver.pooling import PromptPooler, capabilities_of, embedding_capacity, report_pooled
from .driver.sampled import Sampled, TokenFeed, UnreadTokens
from .driver.sequences import BoolArray, SequenceTable
from .driver.speculation.control import MOST_ROWS, CostControl
from .driver.speculation.costs import StepCosts, measure_costs, trial_step
from .driver.speculation.draft_model import DraftModel, drafts_by_model, load_draft_model
from .driver.speculation.speculator import Speculator, make_sources
from .driver.step import (
    BegunStep,
    LaunchedStep,
    StepOutputs,
    StepRunner,
    started_sequences,
    step_times,
)
from .fingerprint import fingerprint, kv_digest
from .runner.attention.backend import AttentionBackend
from .runner.attention.paged import PagedBackend
from .runner.batch import IntArray, Uploader
from .runner.device import describe_device
from .runner.graphs import Capture, CudaCapture, DecodeGraphs
from .runner.interface import make_runner
from .runner.kv_cache import count_blocks, count_slots
from .runner.leader import LeaderMemory, load_ranks
from .runner.loaded_model import LoadedModel, experts_of
from .runner.memory import ReplicaMemory, no_memory
from .runner.rank_weights import LeaderGroups, write_to_ranks
from .runner.ranks.commands import MoveExperts, Reply
from .runner.ranks.processes import Ranks
from .runner.sharded_model import experts_in, move_experts
from .runner.tiers.tiers import BlockTiers
from .runner.weights.checks import busy, limits_of
from .runner.weights.sync_manager import WeightSyncManager
from .runner.weights.transports import WeightGroups

_TRIAL_TOKENS = 64
"""Tokens of the step that measures the time of one."""


class ExecutorCore:
    """Owns the model, the KV tensors and the state of each sequence.

    The constructor loads the model. All methods run on one thread and block while the device
    works. After an error the state is undefined: call `reset`, or `clear` after a ModelError.

    `execute` runs a plan. Where `runs_ahead`, the next plan may be launched before the result of
    the one before is read: `launch` each plan and `finish` each launched step, both in order. The
    next step then takes the tokens on the device, and a row whose sequence turns out to have
    stopped is dropped. A sequence that returns under its id must be in no unfinished step.

    Over several pipeline stages a launched step is computed by later ranks, and sampled when it is
    finished. Then no sequence may be in two unfinished steps.

    Attributes:
        max_batch_size: `engine.max_batch_size`, or its default for this device.
        runs_ahead: Whether steps may be launched before earlier ones are finished (CUDA, pipeline
            stages).
        runner: The model runner.
        model, cache, adapters: Its parts.
        weights: Writes new weights.
        weight_groups: Groups of trainers, joined by each rank.
        memory: Releases memory.
        constraints: The grammars of samples.
        draft_model: None if there is none.
        ranks: The other ranks; None if there are none.
        tiers: Moves KV blocks to host memory and disk; None if no tier is configured.
        graphs: The recorded decode steps; None if there are none.
        images: Of the sequences' prompts; None if the model takes none.
        off: Why a feature is off: "kernels", "graphs", "speculation", "deterministic". Features in
            use are missing.
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
        shares_kv: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the model and allocate the cache; over several ranks, start their processes.

        Args:
            config: The settings.
            now_ns: The clock for `start_ns` and `end_ns`.
            model: Replaces the model of the settings.
            backend: Replaces the back end that fits model and machine.
            num_blocks: Blocks of the cache; as many as memory allows when None.
            runs_ahead: Replaces the default of the device.
            shares_kv: Whether to exchange KV blocks with other executors.
            ranks: The other ranks, if `model` is one rank's shard.

        Raises:
            ModelError: The model can't be loaded, the cache doesn't fit, or deterministic mode is
                required and impossible.
            RankError: A rank has ended.
        """
        if model is None:
            ranks, model = load_ranks(config)
        self.model, self.ranks = model, ranks
        self._experts = experts_in(model.module) if model.shards is not None else []
        self.max_batch_size = config.batch_size_on(model.device.type)
        config = msgspec.structs.replace(config, max_batch_size=self.max_batch_size)
        draft = load_draft_model(config, model) if drafts_by_model(config) else None
        num_blocks = num_blocks or count_blocks(config, model, draft)
        self.runner = runner = make_runner(config, model, num_blocks, backend, self.ranks)
        self.cache, self.adapters = runner.cache, runner.adapters
        limits = limits_of(model.whole, config.max_weight_tensors, config.max_weight_bytes)
        write, self.weight_groups = None, WeightGroups()
        if ranks and model.shards:
            write = partial(write_to_ranks, ranks, model.shards)
            self.weight_groups = LeaderGroups(ranks, model.shards)
        self.weights = WeightSyncManager(model.module, limits, shards=model.shards, write=write)
        self._now_ns = now_ns
        rows = count_slots(config)
        # Of sequences in unfinished steps of a pipeline, and of those that a plan has dropped.
        self._computing, self._dropped = set[int](), set[int]()
        self._table = SequenceTable(rows, model.max_model_len, config.block_size)
        self.draft_model: DraftModel | None = None
        if draft is not None:
            self.draft_model = DraftModel(config, draft, self._table, num_blocks, model.vocab_size)
        caches = (self.cache, *((self.draft_model.cache,) if self.draft_model else ()))
        huge = config.huge_pages == "auto"
        make_memory = partial(LeaderMemory, ranks) if ranks else ReplicaMemory
        self.memory = make_memory(caches, self.weights, huge_pages=huge)
        self._embedding, self._role = embedding_capacity(config, model), config.role
        compiler = GrammarCompiler.of(config, model.vocab_size)
        if model.generates:
            compiler.make_ready()
        self.constraints = Constraints(self._table, compiler, now_ns)
        self.images = SequenceImages.of(config, model, self._table)
        self._feed = TokenFeed(rows, model.device)
        self._unread = UnreadTokens(self._table)
        self._capture: Capture | None = None
        feeds = model.device.type == "cuda" if runs_ahead is None else runs_ahead
        self.runs_ahead = feeds or model.pipeline is not None
        self.graphs: DecodeGraphs | None = None
        self.off = dict(runner.off)
        in_order, most = "deterministic" not in self.off, config.max_tokens_per_batch
        self._pooler = PromptPooler(runner, self._table, most, in_order=in_order)
        self._record_at_load(config)
        self._speculator = self._make_speculator(config)
        self._fingerprint = fingerprint(config, model, runner, weight_version=self.weights.version)
        self.tiers: BlockTiers | None = None
        if config.kv_host_bytes or config.kv_disk_path or (shares_kv and model.layers):
            self.tiers = self._make_tiers(config, shares=shares_kv)
        self._steps = self._make_steps(config)

    def _make_steps(self, config: EngineConfig) -> StepRunner:
        return StepRunner(
            runner=self.runner,
            table=self._table,
            upload=Uploader(self.model.device),
            pooler=self._pooler,
            constraints=self.constraints,
            feed=self._feed,
            unread=self._unread,
            speculator=self._speculator,
            chooser=TokenChooser(self._table, config.logprobs_mode == "raw", self.runner.kernels),
            images=self.images,
            runs_ahead=self.runs_ahead and self.model.pipeline is None,
        )

    def _make_tiers(self, config: EngineConfig, *, shares: bool) -> BlockTiers:
        return BlockTiers(
            config,
            self.model,
            self.cache,
            self.weights.version,
            self._measure_token_ns(),
            computation=kv_digest(self._fingerprint),
            shares=shares,
        )

    def _make_speculator(self, config: EngineConfig) -> Speculator | None:
        if not self.model.generates:
            self.off["speculation"] = "the model generates nothing"
        elif config.speculation == "off":
            self.off["speculation"] = "engine.speculation is off"
        elif self.graphs is not None:
            # A step with drafts is launched operation by operation, so its measured costs say
            # nothing of the time that a recorded one takes.
            self.off["speculation"] = "steps are replayed as CUDA graphs"
            if self.draft_model is not None:
                raise ModelError(
                    "steps are replayed as CUDA graphs, which exclude a draft model; set "
                    "cuda_graphs to off, or draft_model_path to ''"
                )
        if "speculation" in self.off:
            return None
        sources = make_sources(config, self._table, self.constraints)
        control = CostControl(self._measure_costs())
        return Speculator(self._table, self.constraints, sources, control, self.draft_model)

    def _measure_costs(self) -> StepCosts:
        with self.runner.active():
            longest = self.model.max_model_len
            return measure_costs(trial_step(self.runner), MOST_ROWS, self._now_ns, longest=longest)

    def _measure_token_ns(self) -> int:
        """Return the time to compute a token of a prompt, among others."""
        step = trial_step(self.runner)
        with self.runner.active():
            step(_TRIAL_TOKENS, 1)
            started_ns = time.perf_counter_ns()
            step(_TRIAL_TOKENS, 1)
        return (time.perf_counter_ns() - started_ns) // _TRIAL_TOKENS

    def capacity(self) -> ReplicaCapacity:
        """Return this replica's capacity."""
        parts: list[Section] = []
        if adapters := self.adapters.describe():
            parts.append(AdapterCapacity(adapters))
        if self._embedding is not None:
            parts.append(self._embedding)
        if experts := experts_of(self.model.hf_config)[0]:
            parts.append(ExpertCapacity(experts))
        if self._speculator is not None:
            parts.append(DraftCapacity())
        if self.tiers is not None:
            parts.append(self.tiers.capacity)
        if self.images is not None:
            parts.append(self.images.capacity)
        parts.append(FingerprintCapacity((self._fingerprint,)))
        return ReplicaCapacity(
            num_blocks=self.cache.num_blocks,
            block_size=self.cache.block_size,
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            device=describe_device(self.model.device),
            weight_version=self.weights.version,
            lacks=self.memory.lacks,
            max_batch_size=self.max_batch_size,
            capabilities=capabilities_of(self.model, self._embedding, self._role),
            exact="deterministic" not in self.off,
            pipeline_stages=1 if self.model.pipeline is None else self.model.pipeline.num_stages,
            parts=tuple(parts),
        )

    def facts(self) -> dict[str, int | float | str]:
        """Return the model's size for reports; memory counts as if none were released."""
        model = self.model
        experts, active = experts_of(model.hf_config)
        sizes = () if model.pipeline is None else model.pipeline.sizes
        return {
            "parameters": model.num_parameters,
            "weight_bytes": model.weight_bytes,
            "kv_bytes": self.cache.num_bytes,
            "vocab_size": model.vocab_size,
            "max_batch_size": self.max_batch_size,
            "dtype": str(model.dtypes.weights).removeprefix("torch."),
            "deterministic": int("deterministic" not in self.off),
            "experts": experts,
            "active_experts": active,
            # Of each pipeline stage.
            **({"stage_layers": "+".join(map(str, sizes))} if sizes else {}),
        }

    def report_ranks(self) -> list[Reply]:
        """Return what each rank uses, this one first; [] if there are no others.

        Raises:
            RankError: A rank has ended, or doesn't answer.
        """
        return [self.runner.report(), *self.ranks.report()] if self.ranks is not None else []

    @property
    def expert_owners(self) -> list[int]:
        """The rank of each expert of a layer; [] where they have none."""
        return list(self._experts[0].owners or ()) if self._experts else []

    def move_experts(self, owners: Sequence[int]) -> None:
        """Give experts other owners, between two steps. No token changes.

        Args:
            owners: The rank of each expert of a layer; each rank owns equally many.

        Raises:
            WeightsError: Experts have no owners here, or these don't fit; or, as `weights_busy`,
                new weights wait for the next step.
            RankError: A rank has ended.
        """
        before = self.expert_owners
        if not before or self.ranks is None:
            raise WeightsError(
                "experts have no owners here; set engine.expert_parallel to engine.tensor_parallel"
            )
        if sorted(owners) != sorted(before):
            size = len({*before})
            share = len(before) // size
            raise WeightsError(
                f"the owners of {len(before)} experts must be ranks below {size}, each of them "
                f"{share} times; got {shown(list(owners))}"
            )
        if self.weights.pending_receipt:
            raise busy()  # ranks hold parts of new weights for the owners of now
        self.ranks.tell(MoveExperts(tuple(owners)))
        move_experts(self.model.module, owners)
        if self.model.shards is not None:
            self.model.shards.layout += 1

    def take_expert_tokens(self) -> list[int]:
        """Return the tokens of each expert, over all layers, since the last call; [] without a
        count."""
        counts = [each.read_counts(reset=True) for each in self._experts]
        return [sum(each) for each in zip(*counts, strict=True)]

    def record_graphs(self, capture: Capture) -> None:
        """Record the decode steps, which takes a PagedBackend, and use them from then on.

        Raises:
            RuntimeError: The model's step can't be recorded.
        """
        backend = self.runner.backend
        assert isinstance(backend, PagedBackend)
        try:
            with self.runner.active():
                self.graphs = DecodeGraphs(
                    self.model, backend, self.cache, self._feed, capture, self.max_batch_size
                )
        except RuntimeError as error:
            self.off["graphs"] = f"the model's step can't be recorded: {error}"
            raise
        self._capture = capture
        self.off.pop("graphs", None)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Allocate released memory again. Graphs are recorded again once all of it is there.

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
        """As `AdapterTable.switch`, with the sequences that have the adapter; between two steps."""
        self._table.change_adapter(*self.adapters.switch(id, version))

    def reset(self) -> None:
        """Drop all sequences. The KV tensors stay as they are."""
        self.weights.start_over()
        if self.tiers is not None:
            self.tiers.reset()
        if self._speculator is not None:
            self._speculator.clear()
        for part in (self._table, self._pooler, self._unread, self.constraints):
            part.clear()
        if self.images is not None:
            self.images.clear()
        self._computing, self._dropped = set(), set()

    def clear(self) -> None:
        """Drop all sequences and all KV, which may not be finite after a ModelError.

        Other sequences would read it in reused blocks, masked or not: 0 * NaN is NaN.
        """
        self.reset()
        self.cache.clear()

    def close(self) -> None:
        """Free KV and model, even while references to this object live; it is unusable then.

        A model that was given to the constructor is as it was before.
        """
        self.constraints.close()
        if self.tiers is not None:
            self.tiers.close()
        self.runner.close()
        if self.draft_model is not None:
            self.draft_model.close()
        if self.ranks is not None:
            self.ranks.close()
        del self.model, self.weights, self.cache, self.memory, self.adapters, self.runner
        del self._pooler, self.graphs, self._capture, self._experts
        del self._steps, self._speculator, self.draft_model, self.weight_groups

    def execute(self, plan: StepPlan, images: Mapping[str, StoredImage] = NO_IMAGES) -> StepResult:
        """Run one plan. `images`: those that it encodes, by name. Without one its request fails.

        Rows of sequences that finished in an earlier step are dropped: batching plans one step
        ahead of the results.

        Raises:
            ValueError: The plan contradicts earlier ones: an unknown sequence, more tokens than
                are known, positions without blocks, rows while memory is released.
            ModelError: The model's output is broken.
            WeightsError: The plan's weights could not be written and none are in place. Neither
                this plan nor, until `reset`, any later one is run.
        """
        return self.finish(self.launch(plan, images))

    def launch(self, plan: StepPlan, images: Mapping[str, StoredImage] = NO_IMAGES) -> LaunchedStep:
        """Start one plan; where `runs_ahead`, the device may still have to compute it.

        Raises:
            ValueError: As `execute`.
            ModelError: As `execute`, if it shows already; or a WeightsError.
        """
        start_ns = self._now_ns()
        self._apply(plan, images)
        changes = plan.weight_version or plan.release or plan.adapters
        changed_ns = self._now_ns() if changes else 0
        rows, num_tokens, num_drafts, runs = self._select(plan)
        times = step_times(plan, runs, num_tokens, changed_ns)
        if rows.size and not self.memory.runs:
            raise ValueError(f"the plan has rows, and the replica lacks {self.memory.lacks}")
        outputs = StepOutputs()
        begun: BegunStep | None = None
        with self.runner.active():
            if rows.size and self.model.pipeline is None:
                outputs = self._steps.run(rows, num_tokens, num_drafts, self.graphs)
            elif rows.size:
                started = self._steps.begin(rows, num_tokens, None, None)
                assert isinstance(started, BegunStep), "there are no graphs, and no encoder"
                begun = started
                self._computing.update(plan.seq_ids)
        spoiled: tuple[int, ...] = ()
        failed: tuple[Cancel, ...] = ()
        if self.images is not None:
            spoiled, failed = self.images.take_spoiled(plan), self.images.take_failures()
        if plan.kv_offers:
            # Not in `finish`: the next plan may load from these slots.
            assert self.tiers is not None, "a plan offers blocks, and there are no tiers"
            self.tiers.offer(plan.kv_offers, plan.step_id)
        computing = self._computing if begun else None
        version = self.weights.version
        return LaunchedStep(
            plan, version, start_ns, outputs, begun, computing, failed, spoiled, times
        )

    def finish(self, step: LaunchedStep) -> StepResult:
        """Wait for the oldest launched step and return its result.

        A step from before a `reset` has no tokens.

        Raises:
            ModelError: The model's output is broken.
        """
        outputs, sampled = step.outputs, Sampled()
        if step.begun is not None:
            step.wait()
            if step.computing is self._computing:
                with self.runner.active():
                    outputs = self._steps.end(step.begun)
        if outputs.sampled is not None:
            sampled = self._unread.read(outputs.sampled)
            if self._speculator is not None:
                if not self.runs_ahead:
                    self._speculator.timed((self._now_ns() - step.start_ns) * 1e-9)
                self._speculator.observe(outputs.sampled, sampled.seq_ids, outputs.proposed)
        if step.computing is self._computing:  # not from before a `reset`
            self._computing.difference_update(step.plan.seq_ids)
            for seq_id in self._dropped.intersection(step.plan.seq_ids):
                self._drop(seq_id)
        drafts = tuple(one for one in outputs.verified if one.seq_id in sampled.seq_ids)
        times = step.times
        if drafts:
            drafted = sum(draft.num_tokens for draft in drafts)
            times = msgspec.structs.replace(times, num_tokens=times.num_tokens + drafted)
        parts: list[Section] = [times, *step.plan.onward]
        if outputs.prompts:
            parts.append(PromptScores(outputs.prompts))
        if pooled := report_pooled(outputs.pooled):
            parts.append(PooledResult(pooled))
        if drafts or outputs.draft_rest:
            parts.append(DraftsResult(drafts, outputs.draft_rest))
        if step.spoiled:
            parts.append(ImagesResult(step.spoiled))
        rows = msgspec.structs.asdict(sampled)
        if versions := rows.pop("adapter_versions"):
            parts.append(AdaptersResult(versions))
        return StepResult(
            step_id=step.plan.step_id,
            started=started_sequences(step.plan, step.start_ns),
            ended=step.plan.ended,
            weight_version=step.weight_version,
            start_ns=step.start_ns,
            end_ns=self._now_ns(),
            failed=step.failed + self.constraints.take_failures(),
            parts=tuple(parts),
            **rows,
        )

    # --- inside -------------------------------------------------------------------------------

    def _drop(self, seq_id: int) -> None:
        self._table.remove(seq_id)
        self._pooler.forget(seq_id)
        self._dropped.discard(seq_id)

    def _record_at_load(self, config: EngineConfig) -> None:
        if self.model.device.type != "cuda":
            self.off["graphs"] = "they are for CUDA"
        elif not self.model.generates:
            self.off["graphs"] = "the model generates nothing"
        elif "kernels" in self.off:
            self.off["graphs"] = self.off["kernels"]
        elif config.cuda_graphs == "off":
            self.off["graphs"] = "engine.cuda_graphs is off"
        else:
            with suppress(RuntimeError):
                self.record_graphs(CudaCapture(self.model.device))

    def _apply(self, plan: StepPlan, images: Mapping[str, StoredImage]) -> None:
        """Apply the plan's changes. Finished first: a preempted sequence may return at once."""
        self.weights.finish_planned_sync(plan.weight_version)
        if self.memory.pending.intersection(plan.release):
            if self.graphs is not None:
                # Graphs hold memory of their own, and addresses of released tensors.
                self.graphs, self.off["graphs"] = None, "memory is released"
            self.memory.release(plan.release)
            if self.draft_model is not None:
                self.draft_model.forget_kv()
        for seq_id in plan.finished:
            if self._speculator is not None:
                self._speculator.forget(seq_id)
            if seq_id in self._computing:
                self._dropped.add(seq_id)
            else:
                self._drop(seq_id)
        for adapter, version in plan.adapters:
            self.switch_adapter(adapter, version)
        if self.images is not None:
            self.images.apply(plan, images)
        for new in plan.new:
            self._table.add(new, self.adapters.slot_of(new.info.adapter))
            if new.parts and (media := PromptMedia.find(new.parts)) is not None:
                self._place_images(new, media.items)
        try:
            for seq_id, block_ids in plan.grown:
                self._table.append_blocks(seq_id, block_ids)
        except KeyError as error:
            raise ValueError(f"the plan grows sequence {error}, which is unknown") from None
        if plan.kv_moves:
            assert self.tiers is not None, "a plan moves blocks, and there are no tiers"
            self.tiers.apply(plan.kv_moves)
        self.cache.copy_blocks(plan.copies)
        if len(self._table.finished) > self._feed.padding_row:
            # Only in plans made by hand: batching keeps to max_batch_size.
            self._feed.enlarge(len(self._table.finished))
            if self._capture is not None:
                self.record_graphs(self._capture)

    def _place_images(self, new: NewSequence, media: tuple[MediaItem, ...]) -> None:
        if self.images is None:
            raise ValueError(f"sequence {new.seq_id} has images, and the model takes none")
        self.images.add(new, media)

    def _select(self, plan: StepPlan) -> tuple[IntArray, IntArray, IntArray | None, BoolArray]:
        """Return table rows, tokens to compute and drafts allowed, of sequences that still run; and
        which of the plan's rows they are."""
        try:
            rows = self._table.rows_of(plan.seq_ids)
        except KeyError as error:
            raise ValueError(f"the plan names sequence {error}, which is unknown") from None
        num_tokens = np.array(plan.num_tokens, np.int64)
        # A sequence at its limit has finished, even while its last token is unread.
        running = ~(self._table.finished[rows] | self._table.at_limit(rows))
        num_drafts = np.array(plan.num_drafts, np.int64)[running] if plan.num_drafts else None
        return rows[running], num_tokens[running], num_drafts, running
