"""Puts the kernels to use in a Transformers model: by pattern, and only where they agree.

A pattern looks at a module's parts and, if it knows them, offers a forward pass. The model then
runs once as it is, and every offer is compared with what the module itself gave for the same input.
Offers that differ, such as a norm that scales in another place or positions that rotate in another
way, are dropped, and these modules stay as they are. So nothing depends on an architecture's name.
Where all layers of a decoder agreed, one call takes the place of them if it gives the same bits.

The passes are used within `FastModules.active()` only. Whoever else calls the model, such as a
trainer that shares it, runs Transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ..attention.cpu import CpuBackend
from ..batch import Rows
from ..fixed_tiles import FixedTiles
from ..inputs import InputBuilder, model_forward
from ..kv_cache import KVCache
from ..loaded_model import LoadedModel
from .gradients import differentiable
from .patterns import Calls, Forward, find_patterns, join_layers, join_output

_COMPARED_TOKENS = 8

_TOLERANCES = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Most difference relative to the output, by dtype. Correct offers differ by rounding, about 0.004
and 1e-6."""


class FastModules:
    """The modules of one model that have a fast forward pass.

    Attributes:
        count: How many there are, by class name.
        refused: By class name, why modules that a pattern knew stay as they are.
        is_whole: Whether nothing of the model is left to torch but its embeddings and rotary
            factors, in steps that go through all layers in one call.
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
        """Compares and installs what there is for a model. Overwrites some blocks of the cache.

        Args:
            model: A model on the CPU, for whose dtype there are kernels.
            cache: What the model will be used with, and nothing else.
            builder: Makes the inputs of its steps.
            tiles: What is left to torch within the pass of all layers runs in these; own ones when
                None.
            with_gradients: The passes have gradients, through the modules' own code. No call takes
                the place of all layers then.
        """
        self.count: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self.is_whole = False
        self._active = False
        self._with_gradients = with_gradients
        self._calls = Calls(FixedTiles() if tiles is None else tiles)
        # What each module had in place of its class's pass, if anything, in the order of changes.
        self._replaced: list[tuple[nn.Module, Forward | None]] = []
        length = min(_COMPARED_TOKENS, model.max_model_len, cache.num_blocks * cache.block_size)
        tables = np.arange(-(-length // cache.block_size))[None]
        rows = Rows(np.array([0]), np.array([length]), tables, 0)
        token_ids = np.random.default_rng(0).integers(0, model.vocab_size, length)
        inputs = builder.build(rows, token_ids, np.array([length - 1]))

        def run() -> None:
            model_forward(model.module, inputs, cache)

        agree = partial(_agree, tolerance=_TOLERANCES[model.dtype])
        self._agreed = self._compare(find_patterns(model, self._calls), run, agree)
        self._install(self._agreed)
        if not with_gradients and isinstance(inputs.backend, CpuBackend):
            # All layers in one call, where that gives the same bits as one by one.
            joined = join_layers(model, cache, self._agreed, self._calls)
            with self.active():
                agreed = self._compare(joined, run, _same_bits)
                self._install(agreed)
                self._install(self._compare(join_output(model, agreed), run, _same_bits))
            self.is_whole = self._has_all(model, agreed)

    def _has_all(self, model: LoadedModel, joined: Mapping[nn.Module, Forward]) -> bool:
        output = model.module.get_output_embeddings() if model.generates else None  # type: ignore[operator]
        base = model.base
        ends = (output, getattr(base, "norm", None)) if model.generates else (base.norm,)
        return base in joined and all(each in self._agreed for each in ends)

    def remove(self) -> None:
        """Gives the modules the passes back that they had; nothing here holds them any more.

        Of several that share a model, the one made last goes first.
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
        """Within it, calls of the model take the fast passes.

        Args:
            alone: Each linear layer is called by itself, and whoever has put something around it
                is not passed over. The bits are the same.
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
        """The first offer for each module that agrees with what the module gives."""
        agreed: dict[nn.Module, Forward] = {}

        def comparison(offers: Sequence[Forward]) -> Callable[..., None]:
            def compare(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                why = "it computes something else"
                for fast in offers:
                    try:
                        right = agree(fast(*args, **kwargs), output)
                    except (TypeError, ValueError, RuntimeError) as error:
                        # The module is called in a way that the pattern does not know.
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


def _agree(offered: Any, wanted: Any, tolerance: float) -> bool:
    if isinstance(wanted, tuple):
        offered, wanted = offered[0], wanted[0]
    if offered.shape != wanted.shape:
        return False
    difference = (offered.float() - wanted.float()).norm()
    return bool(difference <= tolerance * wanted.float().norm())


def _same_bits(offered: Any, wanted: Any) -> bool:
    return type(offered) is type(wanted) and torch.equal(offered[0], wanted[0])
