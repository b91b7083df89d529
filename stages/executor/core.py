"""The executor's core: driver and model runner, put together. It runs the plans of batching."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...bus.control import Capability, ReplicaCapacity
from ...bus.sections import Sections, name_of
from ...bus.steps import StepPlan, StepResult
from ...config import EngineConfig
from ..parts import Kind
from .driver.choose import TokenChooser
from .driver.constraints import Constraints
from .driver.sampled import Sampled, TokenFeed, UnreadTokens
from .driver.sequences import SequenceTable, started_sequences
from .driver.step import BegunStep, LaunchedStep, StepRunner
from .parts import ExecutorState, Part, load_companion, make_parts
from .runner.attention.backend import AttentionBackend
from .runner.batch import Uploader
from .runner.device import describe_device
from .runner.interface import count_blocks, count_slots, fit_batch_size, make_runner, with_kv_dtype
from .runner.loaded_model import LoadedModel
from .runner.loading import load_ranks

if TYPE_CHECKING:
    from .runner.ranks.processes import Ranks


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

    Optional features are parts (`parts/`), which the core calls by their hooks.

    Attributes:
        state: State that core and parts share.
        model, runner, cache, ranks, constraints, off: The fields of `state` with these names.
        max_batch_size: `engine.max_batch_size`, or its default for this device.
        runs_ahead: Whether steps may be launched before earlier ones are finished (CUDA, pipeline
            stages).
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
        self.model, self.ranks = model, ranks = with_kv_dtype(config, model), ranks
        self.max_batch_size = fit_batch_size(config, model)
        config = msgspec.structs.replace(config, max_batch_size=self.max_batch_size)
        companion = load_companion(config, model)
        num_blocks = num_blocks or count_blocks(config, model, companion)
        self.runner = runner = make_runner(config, model, num_blocks, backend, ranks)
        self.cache, self.off = runner.cache, dict(runner.off)
        self._now_ns = now_ns
        rows = count_slots(config, model)
        # Of sequences in unfinished steps of a pipeline, and of those that a plan has dropped.
        self._computing, self._dropped = set[int](), set[int]()
        self._table = SequenceTable(rows, model.max_model_len, config.block_size)
        self.constraints = Constraints(self._table, config, model.vocab_size, now_ns)
        self._feed = TokenFeed(rows, model.device)
        self._unread = UnreadTokens(self._table)
        feeds = model.device.type == "cuda" if runs_ahead is None else runs_ahead
        self.runs_ahead = feeds or model.pipeline is not None
        self._steps = StepRunner(
            runner=runner,
            table=self._table,
            upload=Uploader(model.device),
            constraints=self.constraints,
            feed=self._feed,
            unread=self._unread,
            chooser=TokenChooser.of(self._table, config, kernels=runner.kernels),
            runs_ahead=self.runs_ahead and model.pipeline is None,
        )
        self.state = ExecutorState(
            config=config,
            model=model,
            runner=runner,
            ranks=ranks,
            table=self._table,
            constraints=self.constraints,
            feed=self._feed,
            steps=self._steps,
            runs_ahead=self.runs_ahead,
            now_ns=now_ns,
            off=self.off,
            caches=[runner.cache],
        )
        self._parts = self.state.parts
        for part in make_parts(self.state, companion, shares_kv=shares_kv):
            self.use(part)

    def use(self, part: Part) -> None:
        """Use a part from now on, after those in use."""
        self._parts.use((*self._parts.all, part))

    def part(self, kind: type[Kind]) -> Kind:
        """Return the part of a class. Raises KeyError if it is not in use."""
        return self._parts.get(kind)

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the part of a class; None if it is not in use."""
        return self._parts.find(kind)

    def capacity(self) -> ReplicaCapacity:
        """Return this replica's capacity."""
        model = self.model
        tasks: tuple[Capability, ...] = ()
        if model.generates and self.state.config.role != "embed":
            tasks = "generate", "score"
        found = ReplicaCapacity(
            num_blocks=self.cache.num_blocks,
            block_size=self.cache.block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            device=describe_device(model.device),
            max_batch_size=self.max_batch_size,
            capabilities=tasks,
            exact="deterministic" not in self.off,
            pipeline_stages=1 if model.pipeline is None else model.pipeline.num_stages,
        )
        for hook in self._parts.capacity:
            found = hook(found)
        return found

    def reset(self) -> None:
        """Drop all sequences. The KV tensors stay as they are."""
        self.state.blocked = None
        for hook in self._parts.reset:
            hook()
        for owner in (self._table, self._unread, self.constraints):
            owner.clear()
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
        for hook in self._parts.close:
            hook()
        self.runner.close()
        if self.ranks is not None:
            self.ranks.close()
        for owner in (*self._parts.all, self._parts, self.state):
            vars(owner).clear()
        del self.model, self.cache, self.runner, self.state, self._steps

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan.

        Rows of sequences that finished in an earlier step are dropped: batching plans one step
        ahead of the results.

        Raises:
            ValueError: The plan contradicts earlier ones: an unknown sequence, more tokens than
                are known, positions without blocks; or a part can't run it.
            ModelError: The model's output is broken.
            WeightsError: No weights are in place. Neither this plan nor, until `reset`, any later
                one is run.
        """
        return self.finish(self.launch(plan))

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start one plan; where `runs_ahead`, the device may still have to compute it.

        Raises:
            ValueError: As `execute`.
            ModelError: As `execute`, if it shows already; or a WeightsError.
        """
        if self.state.blocked is not None:
            raise self.state.blocked
        step = LaunchedStep(plan, self._now_ns())
        self._apply(plan, step)
        self._select(plan, step)
        for hook in self._parts.before:
            hook(step)
        if step.rows.size:
            with self.runner.active():
                if self.model.pipeline is None:
                    step.outputs = self._steps.run(step)
                else:
                    begun = self._steps.begin(step)
                    assert isinstance(begun, BegunStep), "no graphs, and no encoder"
                    step.begun, step.computing = begun, self._computing
                    self._computing.update(plan.seq_ids)
        for hook in self._parts.launched:
            hook(step)
        return step

    def finish(self, step: LaunchedStep) -> StepResult:
        """Wait for the oldest launched step and return its result.

        A step from before a `reset` has no tokens.

        Raises:
            ModelError: The model's output is broken.
        """
        plan, sampled = step.plan, Sampled()
        if step.begun is not None:
            step.wait()
            if step.computing is self._computing:
                with self.runner.active():
                    step.outputs = self._steps.end(step.begun)
        if step.outputs.sampled is not None:
            sampled = self._unread.read(step.outputs.sampled)
        if step.computing is self._computing:  # not from before a `reset`
            self._computing.difference_update(plan.seq_ids)
            for seq_id in self._dropped.intersection(plan.seq_ids):
                self._drop(seq_id)
        for hook in self._parts.finish:
            hook(step, sampled)
        return StepResult(
            step_id=plan.step_id,
            started=started_sequences(plan, step.start_ns) if plan.new else (),
            seq_ids=sampled.seq_ids,
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reasons=sampled.finish_reasons,
            ended=plan.ended,
            weight_version=step.weight_version,
            start_ns=step.start_ns,
            end_ns=self._now_ns(),
            top_logprobs=sampled.top_logprobs,
            failed=step.failed + self.constraints.take_failures(),
            parts=(*step.parts, *plan.onward),
        )

    def _drop(self, seq_id: int) -> None:
        for hook in self._parts.forget:
            hook(seq_id)
        self._table.remove(seq_id)
        self._dropped.discard(seq_id)

    def _apply(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Apply the plan's changes. Finished first: a preempted sequence may return at once."""
        for seq_id in plan.finished:
            if seq_id in self._computing:
                self._dropped.add(seq_id)
            else:
                self._drop(seq_id)
        if plan.parts:
            self._apply_parts(plan.parts, step)
        for new in plan.new:
            self._steps.add(new)
        try:
            for seq_id, block_ids in plan.grown:
                self._table.append_blocks(seq_id, block_ids)
        except KeyError as error:
            raise ValueError(f"the plan grows sequence {error}, which is unknown") from None
        self.cache.copy_blocks(plan.copies)
        if len(self._table.finished) > self._feed.padding_row:
            # Only in plans made by hand: batching keeps to max_batch_size.
            self._feed.enlarge(len(self._table.finished))
            for hook in self._parts.enlarged:
                hook()

    def _apply_parts(self, sections: Sections, step: LaunchedStep) -> None:
        """Have each part apply its section, in the order of parts."""
        named, readers = {name_of(each): each for each in sections}, self._parts.readers
        if unknown := named.keys() - readers.keys():
            raise ValueError(f"the plan has {sorted(unknown)}, and no part here takes it")
        for name, (decode, part) in readers.items():
            if name in named:
                part.apply(decode(named[name]), step)
                if part.changes:
                    step.changed_ns = self._now_ns()

    def _select(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Find the plan's rows whose sequences still run."""
        try:
            rows = self._table.rows_of(plan.seq_ids)
        except KeyError as error:
            raise ValueError(f"the plan names sequence {error}, which is unknown") from None
        # A sequence at its limit has finished, even while its last token is unread.
        step.runs = runs = ~(self._table.finished[rows] | self._table.at_limit(rows))
        step.rows = rows[runs]
        step.num_tokens = num_tokens = np.array(plan.num_tokens, np.int64)[runs]
        step.num_computed = int(num_tokens.sum())
