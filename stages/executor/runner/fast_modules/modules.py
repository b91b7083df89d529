"""Installs the kernels in a Transformers model: by pattern, and only where results agree.

A pattern matches a module by its parts and offers a forward pass. The model then runs once
unchanged, and every offer is compared with the module's own output for the same input. Offers that
differ, such as a norm that scales in another place, are dropped. So nothing depends on an
architecture's name. If all layers of a decoder agree, one call replaces them if it gives the same
bits.

The passes are used within `FastModules.active()` only. Other callers of the model, such as a
trainer that shares it, run Transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..attention.paged import CpuBackend
from ..batch import Rows
from ..fixed_tiles import FixedTiles
from ..inputs import InputBuilder, model_forward
from ..kernels import cpu
from ..kv_cache import KVCache
from ..linear.choose import method_of
from ..loaded_model import LoadedModel
from .calls import Calls, join_weights
from .patterns import Forward, find_patterns

if TYPE_CHECKING:
    from .decoder import DecoderLayers

_COMPARED_TOKENS = 8

_TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.0025, torch.float32: 1e-5}
"""The largest relative difference by dtype. Correct offers differ by rounding, about a fifth of
it."""


class FastModules:
    """The modules of one model with a fast forward pass.

    Attributes:
        count: Their number by class name.
        refused: By class name, why matching modules stay unchanged.
        is_whole: Whether torch computes only embeddings and rotary factors in steps that run all
            layers in one call.
        joined: Layers that run in one call.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KVCache,
        builder: InputBuilder,
        *,
        tiles: FixedTiles | None = None,
        with_gradients: bool = False,
    ) -> None:
        """Compare and install the passes for a model. Overwrites some blocks of the cache.

        Args:
            model: A model with kernels for its device and dtype.
            cache: The only cache that the model will be used with.
            builder: Makes the inputs of its steps.
            tiles: For torch's part of the pass of all layers; own ones when None.
            with_gradients: The passes have gradients, through the modules' own code, and layers
                are not joined in one call.
        """
        self.count: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.is_whole = False
        self.joined: list[DecoderLayers] = []
        self._active = False
        self._begin: Callable[[], None] = _nothing
        self._with_gradients = with_gradients
        kernels = module_kernels(model.device)
        if kernels is not cpu and not model.is_shared:
            # They lie side by side since they were loaded, and do again once they are resumed.
            cache.follow(partial(join_weights, model.module))
        self._calls = Calls(FixedTiles() if tiles is None else tiles, kernels)
        # Each module's earlier instance attribute, if any, in the order of changes.
        self._replaced: list[tuple[nn.Module, Forward | None]] = []
        length = min(_COMPARED_TOKENS, model.max_model_len, cache.num_blocks * cache.block_size)
        tables = np.arange(-(-length // cache.block_size))[None]
        states = None if model.mixers is None else np.array([0])
        rows = Rows(np.array([0]), np.array([length]), tables, 0, states=states)
        token_ids = np.random.default_rng(0).integers(0, model.vocab_size, length)
        inputs = builder.build(rows, token_ids, np.array([length - 1]))

        def run(cache: KVCache = cache) -> None:
            model_forward(model.module, inputs, cache)

        compared = partial(run, _numbers_beside(cache, model, tables.size))
        if model.mixers is not None:
            # Each pass begins a sequence.
            self._begin = partial(cache.drop, 0)

        agree = partial(_agree, tolerance=_TOLERANCES[model.dtypes.activations])
        self._agreed = self._compare(find_patterns(model, cache, self._calls), compared, agree)
        self._install(self._agreed)
        whole: dict[nn.Module, Forward] = {}
        linears = [each for each in map(method_of, model.module.modules()) if each is not None]
        if any(each.is_sum for each in linears):
            from .whole import follow_layers

            followed = follow_layers(model, self._agreed, self._calls)
            with self.active():
                whole = self._compare(followed, run, _same_bits)
                self._install(whole)
        alone = not any(each.is_sum and each.exchanges for each in linears)
        if alone and not with_gradients and isinstance(inputs.backend, CpuBackend):
            from .whole import JoinedDecoder, join_layers, join_output

            # All layers in one call, where that gives the same bits as one by one.
            joined = join_layers(model, cache, self._agreed, self._calls)
            with self.active():
                agreed = self._compare(joined, run, _same_bits)
                self._install(agreed)
                output = join_output(model, agreed, self._agreed)
                self._install(self._compare(output, run, _same_bits))
            whole |= agreed
            self.joined = [
                each.together for each in agreed.values() if isinstance(each, JoinedDecoder)
            ]
        self.is_whole = self._has_all(model, whole)

    def _has_all(self, model: LoadedModel, joined: Mapping[nn.Module, Forward]) -> bool:
        if model.pipeline is not None and not model.pipeline.is_last:
            return model.base in joined
        output: Any = model.module.get_output_embeddings() if model.generates else None  # type: ignore[operator]
        method = method_of(output)
        output = output if method is None else method.local
        base, norm = model.base, getattr(model.base, "norm", None)
        ends = (output, norm) if model.generates else (norm,)
        return base in joined and all(each in self._agreed for each in ends)

    def remove(self) -> None:
        """Restore the modules' own passes.

        Of several instances that share a model, remove the newest first.
        """
        while self._replaced:
            module, before = self._replaced.pop()
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._agreed.clear()

    @contextmanager
    def active(self, *, alone: bool = False) -> Iterator[None]:
        """Context in which calls of the model use the fast passes.

        Args:
            alone: Call each linear layer by itself, so that wrappers around it run. The bits are
                the same.
        """
        before = self._active, self._calls.together
        self._active, self._calls.together = True, not alone
        try:
            yield
        finally:
            self._active, self._calls.together = before

    def _compare(
        self,
        candidates: Iterable[tuple[nn.Module, Sequence[Forward]]],
        run: Callable[[], object],
        agree: Callable[[Any, Any], bool],
    ) -> dict[nn.Module, Forward]:
        """Return the first offer for each module that agrees with the module."""
        agreed: dict[nn.Module, Forward] = {}

        def comparison(offers: Sequence[Forward]) -> Callable[..., None]:
            def compare(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                why = "it computes something else"
                for fast in offers:
                    try:
                        self._begin()
                        right = agree(fast(*args, **kwargs), output)
                    except (TypeError, ValueError, RuntimeError) as error:
                        # The module is called in another way than the pattern expects.
                        right, why = False, repr(error)
                    if right:
                        agreed[module] = fast
                        return
                self.refused[type(module).__name__] = why

            return compare

        hooks = [
            module.register_forward_hook(comparison(offers), with_kwargs=True)
            for module, offers in candidates
        ]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        return agreed

    def _install(self, agreed: Mapping[nn.Module, Forward]) -> None:
        for module, fast in agreed.items():
            self._replaced.append((module, vars(module).get("forward")))
            if self._with_gradients:
                from ..gradients import differentiable

                fast = differentiable(module, fast, module.forward)
            module.forward = self._choice(fast, module.forward)
            name = type(module).__name__
            self.count[name] = self.count.get(name, 0) + 1

    def _choice(self, fast: Forward, plain: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._active:
                return fast(*args, **kwargs)
            return plain(*args, **kwargs)

        return forward


def _nothing() -> None: ...


def _numbers_beside(cache: KVCache, model: LoadedModel, num_blocks: int) -> KVCache:
    """Return a cache for comparisons within rounding: one that keeps numbers, since one that is
    rounded in another way may get another code, far beyond rounding."""
    if cache.codes is None:
        return cache
    from ..kv_codes import keep_numbers

    return KVCache(keep_numbers(model), num_blocks, cache.block_size, num_slots=1)


def module_kernels(device: torch.device) -> ModuleType:
    """Return the kernels for parts of decoder layers on a device."""
    if device.type == "cpu":
        return cpu
    from ..kernels import triton_modules

    return triton_modules


def _agree(offered: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, tuple):
        offered, wanted = offered[0], wanted[0]
    if offered.shape != wanted.shape:
        return False
    difference = (offered.float() - wanted.float()).norm()
    return bool(difference <= tolerance * wanted.float().norm())


def _same_bits(offered: Any, wanted: Any) -> bool:
    return type(offered) is type(wanted) and torch.equal(offered[0], wanted[0])
