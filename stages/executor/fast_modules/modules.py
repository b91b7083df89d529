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
from typing import Any

import numpy as np
import torch
from torch import nn

from ..batch import Rows
from ..inputs import InputBuilder, model_forward
from ..kernels.compile import KernelsUnavailable
from ..kernels.cpu import PagedAttention, library
from ..kv_cache import KVCache
from ..model import LoadedModel
from .patterns import Forward, find_patterns, join_layers

_COMPARED_TOKENS = 8

_TOLERANCE = 0.02
"""Most difference relative to the output. Correct offers differ by rounding, about 0.004."""


def find_fast_modules(model: LoadedModel, cache: KVCache, builder: InputBuilder) -> FastModules:
    """Compares and installs what there is for a model. Overwrites some blocks of the cache.

    Raises:
        KernelsUnavailable: There are no kernels on this machine, or none for this model.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        raise KernelsUnavailable(f"there are none for {model.dtype} on {model.device.type}")
    library()
    length = min(_COMPARED_TOKENS, model.max_model_len, cache.num_blocks * cache.block_size)
    tables = np.arange(-(-length // cache.block_size))[None]
    rows = Rows(np.array([0]), np.array([length]), tables, 0)
    token_ids = np.random.default_rng(0).integers(0, model.vocab_size, length)

    def run() -> None:
        inputs = builder.build(rows, token_ids, np.array([length - 1]))
        model_forward(model.module, inputs, cache)

    fast = FastModules(model, run)
    builder.paged = all(map(PagedAttention.handles, cache.keys, cache.values))
    if builder.paged:
        fast.join(cache, run)
    return fast


class FastModules:
    """The modules of one model that have a fast forward pass.

    Attributes:
        count: How many there are, by class name.
        refused: By class name, why modules that a pattern knew stay as they are.
    """

    def __init__(self, model: LoadedModel, run: Callable[[], object]) -> None:
        """Finds them.

        Args:
            model: A bfloat16 model on the CPU.
            run: Runs the model over a few tokens, with a KV cache whose contents don't matter.
        """
        self.count: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self._model = model
        self._active = False
        # What each module had in place of its class's pass, if anything, in the order of changes.
        self._replaced: list[tuple[nn.Module, Forward | None]] = []
        self._agreed = self._compare(find_patterns(model), run, _agree)
        self._install(self._agreed)

    def join(self, cache: KVCache, run: Callable[[], object]) -> None:
        """Takes all layers in one call where that gives the same bits as one by one.

        Args:
            cache: What the layers will be used with, and nothing else.
            run: As in the constructor, with inputs for a kernel that reads the cache in place.
        """
        found = []
        for module in self._model.module.modules():
            joined = join_layers(module, self._model, cache, self._agreed)
            if joined is not None:
                found.append((module, [joined]))
        with self.active():
            self._install(self._compare(found, run, _same_bits))

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
    def active(self) -> Iterator[None]:
        """Within it, calls of the model take the fast passes."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _compare(
        self,
        found: Iterable[tuple[nn.Module, Sequence[Forward]]],
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
            for module, offers in found
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
            module.forward = self._choice(fast, module.forward)
            name = type(module).__name__
            self.count[name] = self.count.get(name, 0) + 1

    def _choice(self, fast: Forward, plain: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._active:
                return fast(*args, **kwargs)
            return plain(*args, **kwargs)

        return forward


def _agree(offered: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        offered, wanted = offered[0], wanted[0]
    if offered.shape != wanted.shape:
        return False
    difference = (offered.float() - wanted.float()).norm()
    return bool(difference <= _TOLERANCE * wanted.float().norm())


def _same_bits(offered: Any, wanted: Any) -> bool:
    return type(offered) is type(wanted) and torch.equal(offered[0], wanted[0])
