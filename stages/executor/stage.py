"""The executor stage's shell."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import anyio.to_thread
import msgspec
import torch
from anyio.abc import TaskGroup

from ...bus import Inbox
from ...bus.control import (
    ImageCapacity,
    ReplicaCapacity,
    ScoreSample,
    StageReady,
    StageStarted,
    TierCapacity,
)
from ...bus.envelope import Envelope
from ...bus.links import CONTROL, HANDOVERS, STEPS_BATCHING, STEPS_STREAMING, at
from ...bus.parts.experts import ExpertCapacity
from ...bus.parts.handover import HandoversResult, first_tokens, leaving_of
from ...bus.parts.images import ImagesPlan
from ...bus.parts.speculation import DraftCapacity, DraftsResult
from ...bus.steps import StepPlan, StepResult
from ...config import BusError, ChannelClosed, EngineConfig, WeightsError
from ...config.collector import collector_paused
from ...telemetry import instruments, names, now_ns
from ...text.gguf_facts import facts_of
from ...text.model_folder import folder_of
from ..actor import Actor, StageContext
from .changes.arguments import Operation
from .changes.shell import StagedChanges
from .core import ExecutorCore
from .driver.step import LaunchedStep
from .facts import facts_of_model, report_ranks
from .parts.memory import MemoryRelease
from .parts.weights import WeightChanges
from .runner.attention.choose import kernels_of
from .runner.device import device_of_replica, is_unverified
from .runner.loading import load_ranks
from .runner.progress import loaded_share
from .runner.ranks.commands import Reply
from .scoring import ReferenceModel, Scoring
from .spans import DraftCounts, ExecutorSpans

if TYPE_CHECKING:
    from ...store.images import StoredImage
    from .driver.speculation.draft_model import DraftModel
    from .parts.experts import Experts
    from .parts.images import Images
    from .parts.tiers import Tiers
    from .runner.tiers.transports.peers import Transfer

# All torch work of a process happens in this one thread, also after a restart of the stage: with a
# second thread, OpenMP would keep two teams of workers that compete for the cores.
_TORCH_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")

# Only waits for the device, so that the torch thread can launch the next step.
_WAITING_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

_PARTING_S = 2.0
"""The time to answer open operations when the stage ends."""

_RANKS_CHECK_S, _RANKS_REPORT_S = 0.2, 5.0
"""Seconds between two checks that the other ranks' processes run, and between two requests for
their reports.
"""

_SMALL_MODEL_PARAMETERS = 30_000_000
"""Below this a step is so short that threads cost more than they save, and many times more where
other processes compete for the cores."""


@collector_paused()
def _load(
    config: EngineConfig, device: int | None, shares_kv: bool
) -> tuple[ExecutorCore, ReferenceModel | None]:
    """Runs on the torch thread. `device`: the replica's index among several devices."""
    if device is not None and (name := device_of_replica(config.device, device)) != config.device:
        chosen = torch.device(name)
        torch.get_device_module(chosen.type).set_device(chosen.index)
        config = msgspec.structs.replace(config, device=name)
    ranks, model = load_ranks(config)
    if model.device.type == "cpu" and ranks is None:  # several ranks share the processors
        # Before the checks and measurements at load, which must match later steps.
        size = sum(parameter.numel() for parameter in model.module.parameters())
        automatic = 1 if size < _SMALL_MODEL_PARAMETERS else torch.get_num_threads()
        torch.set_num_threads(config.cpu_threads or automatic)
    # First, since the other model's KV cache takes the remaining memory.
    reference = ReferenceModel(config) if config.reference_model_path else None
    if reference is not None and config.keeps_unquantized:
        from .runner.whole_model import add_unquantized

        add_unquantized(model.shards, reference.module)
    core = ExecutorCore(config, now_ns=now_ns, model=model, shares_kv=shares_kv, ranks=ranks)
    if core.model.generates:
        core.constraints.make_ready()
    if reference is not None:
        reference.check_fits(core)
    return core, reference


_PATIENCE_S, _PROGRESS_EVERY_S = 2.0, 10.0
"""Seconds of loading before the first line about it, and between two lines."""


async def _on_torch(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.wrap_future(_TORCH_THREAD.submit(function, *args))


class ExecutorStage(Actor):
    """Runs plans on the torch thread in order, and sends the results."""

    name: ClassVar[str] = "executor"

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._core: ExecutorCore
        # Parts that the model and the settings need.
        self._experts: Experts | None = None
        self._images: Images | None = None
        self._tiers: Tiers | None = None
        self._draft_model: DraftModel | None = None
        self._in_flight: asyncio.Queue[tuple[int, StepPlan, Future[StepResult | LaunchedStep]]] = (
            asyncio.Queue()
        )
        # For `load`: plans in flight, steps done.
        self._plans = self._steps = self._measured_steps = 0
        # The last epoch whose plans can't run.
        self._failed_epoch = 0
        # Of each rank; empty if there is one.
        self._rank_reports: list[Reply] = []
        self._facts: dict[str, int | float | str] = {}
        self._layer_kinds: Counter[str] = Counter()
        self._weight_version = 0
        self._changes: StagedChanges
        self._scoring: Scoring
        self._group: TaskGroup
        self._spans = ExecutorSpans(self)
        engine = self.config.engine
        sources = (*engine.draft_sources, *(["model"] if engine.draft_model_path else []))
        # None without speculation.
        self._drafts = None if engine.speculation == "off" else DraftCounts(sources)

    def loaded_share(self) -> float | None:
        return loaded_share()

    async def _say_progress(self) -> None:
        """Log how far the model is loaded, once that takes long."""
        name, wait_s, passed_s = self.config.engine.model_name, _PATIENCE_S, 0.0
        while True:
            await asyncio.sleep(wait_s)
            passed_s, wait_s = passed_s + wait_s, _PROGRESS_EVERY_S
            share = loaded_share()
            done = "preparing" if share is None else f"{share:.0%} of the weights"
            brief = f"loading {name}: {done}, {passed_s:.0f} s"
            self.log.info("model_loading", brief=brief, share=share, seconds=passed_s)

    async def open(self) -> None:
        engine = self.config.engine
        self.log.debug("model_loading", path=str(engine.model_folder))
        started = now_ns()
        # Replicas in one process share its torch thread, and so its device.
        device, shares_kv = self.config.pipeline.replica, bool(self.config.pipeline.roles)
        saying = asyncio.create_task(self._say_progress())
        try:
            self._core, reference = await _on_torch(_load, engine, device, shares_kv)
        finally:
            saying.cancel()
        core = self._core
        self._scoring = Scoring(self, reference, _on_torch)
        if engine.keeps_unquantized:
            self._scoring.lost = lambda: core.part(WeightChanges).manager.lost
        self._changes = StagedChanges(
            self, core, _on_torch, lambda *task: self._group.start_soon(*task)
        )
        capacity = core.capacity()
        self._find_parts(capacity)
        self._facts = {
            "device": capacity.device,
            "max_model_len": capacity.max_model_len,
            "capabilities": ",".join(capacity.capabilities),
            "model": engine.model_name,
            "model_path": str(engine.model_folder),
            "aliases": ",".join(engine.model_aliases),
            **await _on_torch(facts_of_model, core),
            **({"ranks": core.ranks.size} if core.ranks is not None else {}),
            "load_ns": now_ns() - started,
        }
        self._layer_kinds = Counter(spec.span.kind for spec in core.model.layers)
        seconds = (now_ns() - started) / 1e9
        self.log.info(
            "model_loaded",
            brief=f"loaded {engine.model_name} in {seconds:.1f} s, "
            f"{capacity.max_batch_size:,} sequences, {capacity.num_blocks:,} blocks"
            f"{self._beside_blocks()}",
            seconds=round(seconds, 2),
            device=capacity.device,
            kv_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            kv_token_bytes=self._facts.get("kv_token_bytes", 0),
            kv_dtype=self._facts.get("kv_dtype", ""),
            weight_bytes=self._facts.get("weight_bytes", 0),
            max_model_len=capacity.max_model_len,
            kernels=core.off.get("kernels") or kernels_of(core.model),
            attention=core.runner.backend.name,
            graphs=core.off.get("graphs", "recorded"),
            latent_attention=core.model.latent_attention or "none",
            quantization=self._facts.get("quantization") or "none",
            speculation=core.off.get("speculation", "in use"),
            deterministic=core.off.get("deterministic", "yes"),
            reference=engine.reference_model_path or "none",
            **self._states(),
            **self._shares(),
        )
        self._warn()

    def _states(self) -> dict[str, int | str]:
        core = self._core
        if core.model.mixers is None:
            return {}
        return {
            "mixers": core.off.get("mixers", "kernels"),
            "state_bytes": int(self._facts["state_bytes"]),
            "snapshots": core.cache.num_snapshots,
        }

    def _beside_blocks(self) -> str:
        found = self._states()
        if not found:
            return ""
        size = int(found["state_bytes"]) / 1e6
        return f", {size:,.2f} MB of state each, {found['snapshots']:,} snapshots"

    def _find_parts(self, capacity: ReplicaCapacity) -> None:
        """Find the parts that the stage serves, by what the replica announces."""
        core = self._core
        if ExpertCapacity.find(capacity.parts) is not None:
            from .parts.experts import Experts

            self._experts = core.part(Experts)
        if ImageCapacity.find(capacity.parts) is not None:
            from .parts.images import Images

            self._images = core.part(Images)
        if TierCapacity.find(capacity.parts) is not None:
            from .parts.tiers import Tiers

            self._tiers = core.part(Tiers)
        if self.config.engine.draft_model_path and DraftCapacity.find(capacity.parts) is not None:
            from .parts.speculation import Speculation

            self._draft_model = core.part(Speculation).draft_model

    @property
    def _expert_owners(self) -> list[int]:
        return [] if self._experts is None else self._experts.owners

    def _shares(self) -> dict[str, Any]:
        """Return how ranks share the model, for the log; {} on one rank."""
        shares = {
            "ranks": self.config.engine.num_ranks if self._core.ranks is not None else 0,
            "stage_layers": self._facts.get("stage_layers"),
            "expert_owners": ",".join(map(str, self._expert_owners)),
        }
        return {name: value for name, value in shares.items() if value}

    def _warn(self) -> None:
        """Log warnings about the model and its device."""
        model = self._core.model
        if is_unverified(model.device):
            self.log.warning(
                "device_unverified",
                device=self._facts["device"],
                reason="no test has run on such a device",
            )
        for note in model.checkpoint_notes:
            self.log.warning("checkpoint_changed", format=model.checkpoint_format, reason=note)
        facts = facts_of(folder_of(self.config.engine.model_folder))
        if facts is None:
            return
        if facts.unread:
            self.log.warning(
                "gguf_positions_unread",
                unread=", ".join(facts.unread),
                reason="Transformers does not read how the file scales positions, so results may "
                "differ from the original model's",
            )

    async def receive_forever(self, inbox: Inbox) -> None:
        async with anyio.create_task_group() as self._group:
            self._group.start_soon(self._report_forever)
            self._group.start_soon(self._scoring.score_forever)
            self._group.start_soon(self._report_tiers_forever)
            self._group.start_soon(self._changes.tick_forever)
            self._group.start_soon(self._watch_ranks_forever)
            await super().receive_forever(inbox)

    async def close(self) -> None:
        self._changes.close()
        # After the plans in flight; also if the wait below is cut short.
        _TORCH_THREAD.submit(self._scoring.close)
        closed = _TORCH_THREAD.submit(self._core.close)
        del self._core
        with anyio.move_on_after(_PARTING_S, shield=True):
            await self._changes.abandon()
            await asyncio.shield(asyncio.wrap_future(closed))

    async def reset(self) -> None:
        self._spans.clear()
        # After the plans in flight, whose results are dropped.
        _TORCH_THREAD.submit(self._core.reset)

    async def announce(self) -> None:
        await self._changes.begin_epoch(self.leader)
        # After the plans in flight: one of them may put new weights in place.
        capacity = await _on_torch(self._core.capacity)
        self._weight_version = capacity.weight_version
        ready = StageReady(self.role, self.incarnation, capacity)
        await self.send(CONTROL["admission"], ready)
        # If this stage is lost from here on, admission has recorded that batching may rely on it.
        await self.flush(CONTROL["admission"])
        await self.send(self.own(CONTROL["batching"]), ready)
        if self._tiers is not None:
            # After its own writes in flight, so that the list is whole.
            on_disk = await anyio.to_thread.run_sync(
                self._tiers.blocks.on_disk, limiter=anyio.CapacityLimiter(1)
            )
            await self.send(self.own(CONTROL["batching"]), on_disk)
        self.takes_part()
        # The state of the memory may have changed since the capacity was read.
        await self._changes.epoch_begun(capacity.weight_version)

    def load(self) -> dict[str, int | float | str]:
        load: dict[str, int | float | str] = {
            "plans": self._plans,
            "steps": self._steps,
            "weight_version": self._weight_version,
            **self._facts,
        }
        troubles: dict[str, int | str] = {
            "behind_version": self._changes.core.succession.behind,
            "lacks": ", ".join(self._core.part(MemoryRelease).memory.lacks),
            "weights_lost": self._core.part(WeightChanges).manager.lost,
        }
        load |= {name: trouble for name, trouble in troubles.items() if trouble}
        if self._drafts is not None:
            load |= self._drafts.load()
        if self._rank_reports:
            load["rank_bytes"] = ",".join(str(each.resident) for each in self._rank_reports)
        if owners := self._expert_owners:
            load["expert_owners"] = ",".join(map(str, owners))
        return load

    def waits_for(self) -> str:
        return self._changes.restoring or super().waits_for()

    async def measure(self) -> None:
        self.metrics.record(instruments.WEIGHT_VERSION, self._weight_version)
        self.metrics.record(instruments.WEIGHT_BEHIND, self._changes.core.succession.behind)
        self.metrics.record(instruments.ADAPTERS, len(self._core.runner.adapters))
        backend = {names.BACKEND: self._core.runner.backend.name}
        self.metrics.record(instruments.ATTENTION_BACKEND, 1, backend)
        steps, self._measured_steps = self._steps - self._measured_steps, self._steps
        for kind, layers in self._layer_kinds.items():
            labels = backend | {names.LAYER_KIND: kind}
            self.metrics.record(instruments.ATTENTION_LAYERS, steps * layers, labels)
        if self._experts is not None and self._experts.owners:
            for expert, tokens in enumerate(await _on_torch(self._experts.take_tokens)):
                self.metrics.record(instruments.EXPERT_TOKENS, tokens, {names.EXPERT: str(expert)})
        for rank, report in enumerate(self._rank_reports):
            sizes = {"resident": report.resident, "weights": report.weights, "kv": report.kv}
            for kind, size in sizes.items():
                labels = {names.RANK: str(rank), names.MEMORY_KIND: kind}
                self.metrics.record(instruments.RANK_MEMORY, size, labels)
        for measurement in self._drafts.take() if self._drafts is not None else ():
            self.metrics.record(*measurement)

    async def handle(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, StepPlan):
            if not self.in_epoch:
                # Of the epoch before this start, which goes on while admission is down. It builds
                # on plans that this core has not run.
                self.log.debug("plan_dropped", step=envelope.body.step_id)
                return
            core, plan = self._core, envelope.body
            run = core.launch if core.runs_ahead else core.execute
            if plan.parts and self._images is not None:
                given = await self._images_of(plan)
                _TORCH_THREAD.submit(self._images.give, given)
            future: Future[StepResult | LaunchedStep] = _TORCH_THREAD.submit(run, plan)
            self._plans += 1
            self._in_flight.put_nowait((self.epoch, plan, future))
        elif isinstance(envelope.body, ScoreSample):
            self._scoring.ask(envelope.body)
        elif isinstance(envelope.body, Operation):
            self._group.start_soon(self._changes.obey, envelope.body, envelope.operation_id)
        else:
            self.log.warning("message_not_understood", type=type(envelope.body).__name__)

    async def _images_of(self, plan: StepPlan) -> dict[str, StoredImage]:
        """Return the images that a plan encodes, as far as they can be read."""
        found: dict[str, StoredImage] = {}
        images = ImagesPlan.find(plan.parts)
        for item in images.encodes if images is not None else ():
            try:
                image = await self.bus.store.images.get(item.name)
            except ChannelClosed:
                raise
            except BusError as error:
                self.log.warning("image_unreadable", reason=str(error))
                continue
            if image is not None:
                found[item.name] = image
        return found

    async def _report_forever(self) -> None:
        while True:
            epoch, plan, future = await self._in_flight.get()
            try:
                result = await self._result(future)
            except WeightsError as error:
                await self._begin_anew(epoch, error)
                continue
            finally:
                self._plans -= 1
            self._steps += 1
            leaving = leaving_of(plan.parts)
            summary = result.summary(*HandoversResult.of(leaving, result))
            # First, since another replica has nothing else to wait for.
            for successor, handover in first_tokens(plan, summary) if leaving else ():
                await self.send(at(HANDOVERS, successor), handover, epoch=epoch)
            await self.send(self.own(STEPS_BATCHING), summary, epoch=epoch)
            await self.send(self.own(STEPS_STREAMING), result, epoch=epoch)
            self._weight_version = result.weight_version
            await self._changes.step_done(plan, result.weight_version)
            if plan.seq_ids:
                seconds = (result.end_ns - result.start_ns) / 1e9
                self.metrics.record(instruments.DEVICE_TIME, seconds)
            if self._drafts is not None:
                if (drafts := DraftsResult.find(result.parts)) is not None:
                    self._drafts.add(drafts.verified)
                model = self._draft_model
                if model is not None and (failure := model.take_failure()):
                    self.log.warning("draft_model_failed", reason=failure)
            for wait_ns in self._core.constraints.take_waits_ns():
                self.metrics.record(instruments.MASK_WAIT, wait_ns / 1e9)
            if self.tracing.enabled and epoch == self.epoch:
                self._spans.step(plan, result)

    async def _watch_ranks_forever(self) -> None:
        """Notice ranks that have ended or are stopped, also between steps.

        Raises:
            RankError: One has.
        """
        ranks = self._core.ranks
        if ranks is None:
            return
        rounds = max(
            int(min(_RANKS_REPORT_S, self.config.engine.rank_timeout_s) / _RANKS_CHECK_S), 1
        )
        while True:
            self._rank_reports = await _on_torch(report_ranks, self._core)
            for _ in range(rounds):
                await anyio.sleep(_RANKS_CHECK_S)
                ranks.check()

    async def _report_tiers_forever(self) -> None:
        """Send batching what the tiers' threads have done."""
        if self._tiers is None:
            return
        tiers = self._tiers.blocks
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        tiers.follow(wake)
        while True:
            await changed.wait()
            changed.clear()
            epoch = self.epoch
            if (changes := tiers.take_changes()) is not None:
                await self.send(self.own(CONTROL["batching"]), changes, epoch=epoch)
            for transfer in tiers.take_transfers():
                self._record_transfer(transfer)

    def _record_transfer(self, transfer: Transfer) -> None:
        labels = {names.KV_TRANSPORT: transfer.transport or "none"}
        record = self.metrics.record
        record(instruments.KV_TRANSFER_DURATION, transfer.seconds, labels)
        record(instruments.KV_TRANSFER_BYTES, transfer.num_bytes, labels)
        record(instruments.KV_TRANSFER_FAILURES, transfer.num_failed, labels)
        if transfer.error:
            self.log.warning(
                "kv_transfer_failed",
                brief=f"KV could not be read from another executor, and is computed: "
                f"{transfer.error}",
                transport=transfer.transport,
                blocks=transfer.num_failed,
                error=transfer.error,
            )

    async def _begin_anew(self, epoch: int, error: WeightsError) -> None:
        """Ask for a new epoch: no weights are in place, so the plans in flight were not run.

        In the new epoch batching plans no step until weights have come; then requests go on.
        """
        if epoch != self.epoch or epoch == self._failed_epoch:
            return
        self._failed_epoch = epoch
        await self._changes.weights_lost(error)
        started = StageStarted(self.role, self.incarnation)
        await self.send(CONTROL["admission"], started, epoch=0)

    async def _result(self, future: Future[StepResult | LaunchedStep]) -> StepResult:
        """Return a plan's result. Plans that come meanwhile are launched before it is read."""
        outcome = await asyncio.wrap_future(future)
        if isinstance(outcome, StepResult):
            return outcome
        await asyncio.wrap_future(_WAITING_THREAD.submit(outcome.wait))
        return await asyncio.wrap_future(_TORCH_THREAD.submit(self._core.finish, outcome))
