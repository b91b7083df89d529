"""The model runner, and all that the driver imports of it: step inputs in, logits or states out."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor, nn

from ....config import EngineConfig, ModelError
from .adapters.adapter import AdapterLimits
from .adapters.table import NO_ADAPTER as NO_ADAPTER
from .adapters.table import AdapterTable
from .attention.backend import AttentionBackend
from .attention.choose import choose_backend
from .batch import IntArray as IntArray
from .batch import Rows as Rows
from .batch import StepOutput as StepOutput
from .batch import Uploader as Uploader
from .batch import flatten_rows as flatten_rows
from .batch import order_rows as order_rows
from .device import trim
from .fast_modules.modules import FastModules
from .fixed_tiles import FixedTiles
from .fixed_tiles import elementwise as elementwise
from .inputs import InputBuilder, model_forward
from .inputs import StepInputs as StepInputs
from .kernels import cpu as cpu
from .kv_cache import KVCache as KVCache
from .kv_cache import count_blocks as count_blocks
from .kv_cache import count_scratch as count_scratch
from .kv_cache import count_slots as count_slots
from .kv_cache import count_snapshots
from .kv_cache import fit_batch_size as fit_batch_size
from .kv_cache import slot_bytes as slot_bytes
from .kv_cache import with_kv_dtype as with_kv_dtype
from .loaded_model import LoadedModel as LoadedModel
from .media import MediaEmbeddings as MediaEmbeddings
from .media import MediaEncoder as MediaEncoder
from .media import MediaError as MediaError
from .media import Positions as Positions
from .model import load_model as load_model

if TYPE_CHECKING:
    from .deterministic import Determinism
    from .ranks.commands import Reply
    from .ranks.processes import Ranks
    from .routing import Routers as Routers


class ModelRunner(msgspec.Struct, frozen=True, eq=False):
    """A model with its KV cache. It keeps nothing of a step but keys and values.

    Attributes:
        model: The model.
        cache: Its KV cache.
        backend: Computes attention.
        builder: Prepares the inputs of a pass.
        adapters: The adapters that tokens may have.
        fast_modules: The modules that run with our kernels; None if there are none.
        determinism: Deterministic mode; None if it is off.
        active: The context in which steps run.
        off: Why "kernels", "mixers" (their kernels) or "deterministic" are off; {} if none is.
        ranks: The other ranks, which run every step with this one; None if there are none.
    """

    model: LoadedModel
    cache: KVCache
    backend: AttentionBackend[Any]
    builder: InputBuilder
    adapters: AdapterTable
    fast_modules: FastModules | None
    determinism: Determinism | None
    active: Callable[[], AbstractContextManager[object]]
    off: Mapping[str, str]
    ranks: Ranks | None = None

    @property
    def kernels(self) -> bool:
        """Whether our kernels on the CPU compute logits and samples."""
        return self.fast_modules is not None and self.model.device.type == "cpu"

    def forward(self, inputs: StepInputs) -> Tensor:
        """Run one step, as `model_forward`, with the adapters of its tokens."""
        output = self.start(inputs)
        output.wait()
        return output.logits

    def start(self, inputs: StepInputs, *, with_states: bool = False) -> StepOutput:
        """Start a forward pass; over several pipeline stages, return once this rank's stage is
        done.

        Args:
            inputs: The step.
            with_states: Return the last hidden states of all tokens, too.

        Returns:
            The output, to be waited for.
        """
        if self.ranks is not None:
            from .ranks.commands import Forward

            assert inputs.source is not None
            slots = None if inputs.adapters is None else inputs.adapters.slots
            self.ranks.tell(Forward(*inputs.source, with_states, slots))
        pipeline = self.model.pipeline
        states: list[Tensor] | None = [] if with_states else None
        if states is None and inputs.adapters is None:
            logits = model_forward(self.model.module, inputs, self.cache)
        else:
            with self._watched(states), self.adapters.applied(inputs.adapters):
                logits = model_forward(self.model.module, inputs, self.cache)
        last_states = states[0] if states else None
        if pipeline is None:
            return StepOutput(logits, last_states)
        return pipeline.deliver(inputs.position_ids.shape[1], logits, last_states)

    def encode(self, prompts: Sequence[IntArray], max_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the hidden states of whole prompts by an encoder; see `encoder.encode`."""
        from .encoder import encode

        return encode(self.model, prompts, max_tokens)

    def report(self) -> Reply:
        """Return what this rank uses."""
        from .ranks.commands import Reply

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Reply(
            resident=peak if sys.platform == "darwin" else peak * 1024,
            weights=sum(each.nbytes for each in self.model.module.parameters()),
            kv=self.cache.num_bytes,
        )

    def close(self) -> None:
        """Give the modules their own passes back: a cycle would keep the model in memory."""
        if self.fast_modules is not None:
            self.fast_modules.remove()
        if self.model.latent_attention and not self.model.is_shared:
            from .attention.latent import forget_latents

            forget_latents(self.model.module)

    @contextmanager
    def _watched(self, states: list[Tensor] | None) -> Iterator[None]:
        if states is None:
            yield
            return

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            states.append(output.last_hidden_state[0])

        hook = self.model.base.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()


def make_runner(
    config: EngineConfig,
    model: LoadedModel,
    num_blocks: int,
    backend: AttentionBackend[Any] | None = None,
    ranks: Ranks | None = None,
) -> ModelRunner:
    """Allocate the KV cache, and choose back end, kernels and deterministic mode.

    All ranks call it together: its checks run the model.

    Args:
        config: The settings.
        model: The model.
        num_blocks: Blocks of the KV cache.
        backend: Replaces the back end that fits model and machine.
        ranks: On rank 0, the others; None if there are none.

    Raises:
        ModelError: The cache doesn't fit, or deterministic mode is required and impossible.
    """
    make_cache: Callable[..., KVCache] = KVCache
    make_table: Callable[..., AdapterTable] = AdapterTable
    if ranks is not None:
        from .leader import LeaderAdapters, LeaderCache
        from .ranks.commands import Prepare

        make_cache, make_table = partial(LeaderCache, ranks), partial(LeaderAdapters, ranks=ranks)
        ranks.tell(Prepare(num_blocks))
    if ranks is None and backend is None and not model.is_shard and model.generates:
        _compare_with_transformers(config, model)
    huge_pages = config.huge_pages == "auto"
    cache = make_cache(
        model,
        num_blocks,
        config.block_size,
        num_slots=count_slots(config, model) + count_scratch(config, model),
        num_snapshots=count_snapshots(config, model, num_blocks),
        huge_pages=huge_pages,
    )
    reason = "another back end was given"
    if backend is None:
        backend, reason = choose_backend(config, model)
    off = {"kernels": reason} if reason else _take_mixers(model)
    builder = InputBuilder(model, config.block_size, backend)
    tiles, fast, determinism = FixedTiles(), None, None
    if not reason:
        fast = FastModules(model, cache, builder, tiles=tiles)
    if why := _why_not_deterministic(config, model, fast, reason):
        off["deterministic"] = why
    else:
        try:
            determinism = _checked_determinism(model, cache, builder, fast, tiles)
        except ModelError as error:
            if config.deterministic is True:
                raise
            determinism, off["deterministic"] = None, error.message
    active: Callable[[], AbstractContextManager[object]] = nullcontext
    if determinism is not None:
        active = determinism.active
    elif fast is not None:
        active = fast.active
    # The context in which every module is called by itself.
    alone: Callable[[], AbstractContextManager[object]] = nullcontext
    if fast is not None:
        whole = determinism if fast.is_whole else None
        alone = partial(fast.active if whole is None else whole.in_tiles, alone=True)
    adapters = make_table(
        model,
        AdapterLimits(config.max_adapters, config.max_adapter_rank),
        one_by_one=config.deterministic is True,
        check=active if determinism is None else determinism.in_tiles,
        alone=alone,
    )
    trim(torch.device("cpu"))  # of the checks' memory
    if ranks is not None and (why := ranks.prepared()):
        off.setdefault("deterministic", why)
    return ModelRunner(
        model, cache, backend, builder, adapters, fast, determinism, active, off, ranks
    )


def _take_mixers(model: LoadedModel) -> dict[str, str]:
    """Have mixers with recurrent state use kernels, and return why they don't."""
    if model.mixers is None:
        return {}
    why = model.mixers.use_kernels(model.dtypes.activations, model.device)
    return {"mixers": why} if why else {}


def _compare_with_transformers(config: EngineConfig, model: LoadedModel) -> None:
    # Imported here: a step needs neither this nor the sharding of small models.
    from .comparison import compare_with_transformers

    compare_with_transformers(config, model)


def _checked_determinism(
    model: LoadedModel,
    cache: KVCache,
    builder: InputBuilder,
    fast: FastModules | None,
    tiles: FixedTiles,
) -> Determinism:
    """Return deterministic mode. Raises ModelError if it is impossible."""
    # Imported here: there is none on CUDA.
    from .deterministic import Determinism

    determinism = Determinism(model, cache, builder, fast, tiles)
    determinism.check()
    return determinism


def _why_not_deterministic(
    config: EngineConfig, model: LoadedModel, fast: FastModules | None, reason: str
) -> str:
    """Why deterministic mode is not tried; "" if it is. `reason`: why there are no kernels."""
    if config.deterministic != "auto":
        return "" if config.deterministic else "engine.deterministic is false"
    if model.device.type != "cpu":
        return "it is for CPU"
    if fast is None:
        return reason
    # Recurrent states are meant to be exact, also where torch computes a part, in fixed shapes.
    exact = fast.is_whole or model.mixers is not None
    return "" if exact else "kernels take the model in part"
