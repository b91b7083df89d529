"""The executor's optional parts: the one list of them.

A part whose module is imported below is in use with every model and all settings; the others are
imported where they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....config import EngineConfig, ModelError
from ..runner.interface import LoadedModel
from ..runner.loaded_model import experts_of
from .adapters import AdapterChanges
from .embeddings import make_embeddings
from .handover import Handovers
from .memory import MemoryRelease
from .part import AnyPart as AnyPart
from .part import ExecutorState as ExecutorState
from .part import Part as Part
from .recipes import Recipes
from .scoring import PromptScoring
from .times import Times
from .weights import WeightChanges


def load_companion(config: EngineConfig, model: LoadedModel) -> LoadedModel | None:
    """Load a second model whose KV cache has the same block numbers, before the caches are sized.

    Returns:
        None if the settings ask for none.

    Raises:
        ModelError: It can't be loaded, or does not fit the first model.
    """
    if config.speculation == "off" or not config.draft_model_path:
        return None
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

        yield Speculation(state, companion)
    yield Recipes(state)
    if config.kv_host_bytes or config.kv_disk_path or (shares_kv and model.layers):
        from .tiers import Tiers

        yield Tiers(state, shares=shares_kv)
    yield Handovers(state)
    yield PromptScoring(state)
    yield Times(state)


def why_no_graphs(state: ExecutorState) -> str:
    """Return why decode steps are not recorded; "" to try it."""
    if state.model.device.type != "cuda":
        return "they are for CUDA"
    if not state.model.generates:
        return "the model generates nothing"
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
