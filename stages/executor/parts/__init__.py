"""Optional parts of the executor, a module for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ....bus.control import ReplicaCapacity
from ....config import EngineConfig, ModelError
from ...parts import Part as BasePart
from ...parts import Parts
from ..driver.constraints import Constraints
from ..driver.sampled import Sampled, TokenFeed
from ..driver.sequences import SequenceTable
from ..driver.step import LaunchedStep, StepRunner
from ..runner.interface import KVCache, LoadedModel, ModelRunner
from ..runner.loaded_model import experts_of

if TYPE_CHECKING:
    from ..runner.ranks.processes import Ranks


@dataclass(eq=False)
class ExecutorState:
    """The state that the core and its parts share.

    Attributes:
        config: The settings; `max_batch_size` is that of this device.
        model, runner, ranks: The model, its runner, and the other ranks; None if there are none.
        table, constraints, feed: The sequences, their grammars, and their last tokens on the
            device.
        steps: Runs steps.
        runs_ahead: Whether steps may be launched before earlier ones are finished.
        now_ns: The clock.
        off: Why a feature is off, by name. Features in use are missing.
        caches: The KV caches of the model and of a draft model.
        parts: The parts in use.
        blocked: Why no plan can run until a reset; None if plans run.
    """

    config: EngineConfig
    model: LoadedModel
    runner: ModelRunner
    ranks: Ranks | None
    table: SequenceTable
    constraints: Constraints
    feed: TokenFeed
    steps: StepRunner
    runs_ahead: bool
    now_ns: Callable[[], int]
    off: dict[str, str]
    caches: list[KVCache]
    parts: Parts[Part] = field(default_factory=lambda: Parts(Part))
    blocked: Exception | None = None


class Part(BasePart):
    """Base class of parts. `reads` is of a StepPlan.

    Attributes:
        changes: Whether applying the section is a change that the times of a step report.
    """

    changes: ClassVar[bool] = False

    def __init__(self, state: ExecutorState) -> None:
        self.state = state

    def apply(self, section: Any, step: LaunchedStep) -> None:
        """Apply the part's section of a plan, after `finished` and before `new`."""

    def before(self, step: LaunchedStep) -> None:
        """Handle a step whose plan is applied, before its rows are computed."""

    def launched(self, step: LaunchedStep) -> None:
        """Handle a step whose rows are launched."""

    def finish(self, step: LaunchedStep, sampled: Sampled) -> None:
        """Handle a step whose tokens have been read; add sections of its result to `step.parts`."""

    def forget(self, seq_id: int) -> None:
        """A sequence is about to leave the table. Unknown ids are ignored."""

    def enlarged(self) -> None:
        """The token feed was allocated anew, with more rows."""

    def replaced(self) -> None:
        """New weights are in place, for a plan."""

    def released(self) -> None:
        """Memory was released."""

    def resumed(self) -> None:
        """All memory is allocated again. Raises WeightsError if the part lacks memory."""

    def reset(self) -> None:
        """All sequences leave the table."""

    def close(self) -> None:
        """Free everything; the part is unusable then."""

    def capacity(self, found: ReplicaCapacity) -> ReplicaCapacity:
        """Return the replica's capacity with what the part adds to it."""
        return found


def load_companion(config: EngineConfig, model: LoadedModel) -> LoadedModel | None:
    """Load a second model whose KV cache has the same block numbers, before the caches are sized.

    Returns:
        None if the settings ask for none.

    Raises:
        ModelError: It can't be loaded, or does not fit the first model.
    """
    if config.speculation == "off" or not config.draft_model_path:
        return None
    from ..runner.heads import head_of

    if (head := head_of(config)) is not None:
        return head(config, model)
    from ..driver.speculation.draft_model import load_draft_model

    return load_draft_model(config, model)


def make_parts(
    state: ExecutorState, companion: LoadedModel | None, *, shares_kv: bool
) -> Iterator[Part]:
    """Make the parts that settings and model need, in the order of their hooks.

    A part may use those before it.

    Args:
        state: The state that they share.
        companion: From `load_companion`.
        shares_kv: Whether to exchange KV blocks with other executors.

    Raises:
        ModelError: A part is required and impossible.
    """
    from .adapters import AdapterChanges
    from .embeddings import make_embeddings
    from .handover import Handovers
    from .memory import MemoryRelease
    from .per_token import PerToken
    from .recipes import Recipes
    from .scoring import PromptScoring
    from .times import Times
    from .weights import WeightChanges

    config, model = state.config, state.model
    yield WeightChanges(state)
    yield MemoryRelease(state)
    yield AdapterChanges(state)
    if experts_of(model.hf_config)[0]:
        from .experts import Experts

        yield Experts(state)
    if model.vision is not None:
        from .images import Images

        yield Images(state, model.vision)
    if model.mixers is not None:
        from .states import RecurrentStates

        yield RecurrentStates(state)
    yield from make_embeddings(state)
    if why := why_no_graphs(state):
        state.off["graphs"] = why
    else:
        from .graphs import record_at_load

        yield from record_at_load(state)
    if why := why_no_speculation(state, companion):
        state.off["speculation"] = why
    else:
        from .speculation import Speculation

        speculation = Speculation(state, companion)
        yield speculation
        if (head := getattr(companion, "module", None)) is not None and hasattr(head, "reads"):
            from .draft_heads import DraftHeads

            yield DraftHeads(state, speculation, head)
    yield Recipes(state)
    if config.kv_host_bytes or config.kv_disk_path or (shares_kv and model.layers):
        from .tiers import Tiers

        yield Tiers(state, shares=shares_kv)
    yield Handovers(state)
    yield PromptScoring(state)
    if model.generates:
        yield PerToken(state)
    yield Times(state)


def why_no_graphs(state: ExecutorState) -> str:
    """Return why decode steps are not recorded; "" to try it."""
    if state.model.device.type != "cuda":
        return "they are for CUDA"
    if not state.model.generates:
        return "the model generates nothing"
    if state.model.mixers is not None:
        return "the model has recurrent state"
    if "kernels" in state.off:
        return state.off["kernels"]
    return "engine.cuda_graphs is off" if state.config.cuda_graphs == "off" else ""


def why_no_speculation(state: ExecutorState, companion: LoadedModel | None) -> str:
    """Return why drafts are off; "" if they are on.

    Raises:
        ModelError: A draft model can't be used.
    """
    if not state.model.generates:
        return "the model generates nothing"
    if state.config.speculation == "off":
        return "engine.speculation is off"
    if state.steps.graphs is None:
        return ""
    if companion is not None:
        raise ModelError(
            "steps are replayed as CUDA graphs, which exclude a draft model; set "
            "cuda_graphs to off, or draft_model_path to ''"
        )
    # A step with drafts is launched operation by operation, so its measured costs say nothing of
    # the time that a recorded one takes.
    return "steps are replayed as CUDA graphs"
