"""Puts the kernels to use in a Transformers model: by pattern, and only where they agree.

A pattern looks at a module's parts and, if it knows them, offers a forward pass. The model then
runs once as it is, and every offer is compared with what the module itself gave for the same input.
Offers that differ, such as a norm that scales in another place or positions that rotate in another
way, are dropped, and these modules stay as they are. So nothing depends on an architecture's name.

The passes are used within `FastModules.active()` only. Whoever else calls the model, such as a
trainer that shares it, runs Transformers' own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..attention import attend
from ..batch import Rows
from ..inputs import InputBuilder, model_forward
from ..kv_cache import KVCache
from ..model import LoadedModel
from .compile import KernelsUnavailable
from .cpu import MOST_ROWS, Kind, Linear, PagedAttention, gate, library, rms_norm, rotate

Forward = Callable[..., Any]

_COMPARED_TOKENS = 8

_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")

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
    inputs = builder.build(rows, token_ids, np.array([length - 1]))
    fast = FastModules(model, lambda: model_forward(model.module, inputs, cache))
    builder.paged = all(map(PagedAttention.handles, cache.keys, cache.values))
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
        self._active = False
        self._agreed: dict[nn.Module, Forward] = {}
        hooks = [
            module.register_forward_hook(self._comparison(offers), with_kwargs=True)
            for module, offers in _find(model)
        ]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        for module, fast in self._agreed.items():
            module.forward = self._choice(fast, module.forward)
            name = type(module).__name__
            self.count[name] = self.count.get(name, 0) + 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, calls of the model take the fast passes."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _comparison(self, offers: list[Forward]) -> Callable[..., None]:
        def compare(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            why = "it computes something else"
            for fast in offers:
                try:
                    agrees = _agree(fast(*args, **kwargs), output)
                except (TypeError, ValueError, RuntimeError) as error:
                    # The module is called in a way that the pattern does not know.
                    agrees, why = False, repr(error)
                if agrees:
                    self._agreed[module] = fast
                    return
            self.refused[type(module).__name__] = why

        return compare

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


def _find(model: LoadedModel) -> Iterator[tuple[nn.Module, list[Forward]]]:
    """The modules that a pattern knows, each with its offers."""
    output = model.module.get_output_embeddings()  # type: ignore[operator]
    for module in model.module.modules():
        offers: list[Forward] = []
        if type(module) is nn.Linear:
            offers = _linear(module, Kind.WIDE if module is output else Kind.PLAIN)
        elif "RMSNorm" in type(module).__name__:
            offers = _norm(module)
        else:
            patterns = (_decoder_layer(module, model), _attention(module, model))
            offers = next(filter(None, (*patterns, _gated_mlp(module))), [])
        if offers:
            yield module, offers


def _linears(module: nn.Module, *names: str) -> list[nn.Linear]:
    """The linear layers of these names, or none if one is missing or of another kind."""
    found = [getattr(module, name, None) for name in names]
    linears = [
        layer for layer in found if type(layer) is nn.Linear and _fits(layer.weight, layer.bias)
    ]
    return linears if len(linears) == len(names) else []


def _fits(*tensors: Tensor | None) -> bool:
    return all(
        tensor is None or (tensor.dtype == torch.bfloat16 and tensor.is_contiguous())
        for tensor in tensors
    )


def _linear(module: nn.Linear, kind: Kind) -> list[Forward]:
    if not _fits(module.weight, module.bias):
        return []
    fast = Linear([module], kind)

    def forward(x: Tensor) -> Tensor:
        rows = _rows(x)
        if len(rows) > MOST_ROWS:
            return F.linear(x, module.weight, module.bias)
        return fast(rows).view(*x.shape[:-1], module.out_features)

    return [forward]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _norm(module: nn.Module) -> list[Forward]:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(epsilon, float) or not _fits(weight):
        return []

    def offer(shifted: bool) -> Forward:
        def forward(x: Tensor) -> Tensor:
            return rms_norm(x.contiguous(), weight, epsilon, shifted=shifted)

        return forward

    return [offer(False), offer(True)]


def _gated_mlp(module: nn.Module) -> list[Forward]:
    """act(gate_proj(x)) * up_proj(x), through down_proj."""
    gated = _gated(module)
    if gated is None:
        return []
    down: nn.Module = module.down_proj  # type: ignore[assignment]

    def forward(x: Tensor) -> Tensor:
        output: Tensor = down(gated(_rows(x)))
        return output.view_as(x)

    return [forward]


def _gated(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A gated MLP's forward pass up to its last layer, on `[tokens, hidden]`."""
    layers = _linears(module, "gate_proj", "up_proj")
    kind = _kind_of(getattr(module, "act_fn", None))
    if not layers or not _linears(module, "down_proj") or kind is None:
        return None
    if any(layer.bias is not None for layer in layers):
        return None
    inner = Linear(layers, kind)

    def gated(rows: Tensor) -> Tensor:
        if len(rows) <= MOST_ROWS:
            return inner(rows)
        gates, ups = (layer(rows) for layer in layers)
        return gate(gates, ups, kind)

    return gated


def _kind_of(activation: object) -> Kind | None:
    """The kind of kernel with this activation, by what it computes."""
    if not callable(activation):
        return None
    x = torch.linspace(-8, 8, 257)
    known = {Kind.GATED_SILU: F.silu(x), Kind.GATED_TANH_GELU: F.gelu(x, approximate="tanh")}
    found = activation(x)
    for kind, values in known.items():
        if torch.allclose(found, values, rtol=0, atol=1e-6):
            return kind
    return None


def _attention(module: nn.Module, model: LoadedModel) -> list[Forward]:
    """Projections to queries, keys and values, norms of their heads, rotation, our attention."""
    attended = _attended(module, model)
    if attended is None:
        return []
    output: nn.Module = module.o_proj  # type: ignore[assignment]

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        result: Tensor = output(attended(_rows(hidden_states), *args, **kwargs))
        return result.view(hidden_states.shape), None

    return [forward]


def _attended(module: nn.Module, model: LoadedModel) -> Forward | None:
    """An attention module's forward pass up to its last layer, on `[tokens, hidden]`."""
    layers = _linears(module, "q_proj", "k_proj", "v_proj")
    index = getattr(module, "layer_idx", None)
    if not layers or not _linears(module, "o_proj") or not isinstance(index, int):
        return None
    spec, options = model.layers[index], model.attention_options[index]
    if spec.key_dim % 32:
        return None
    kv_heads, width = spec.num_kv_heads, spec.key_dim
    heads = layers[0].out_features // width
    sizes = [layer.out_features for layer in layers]
    projection = Linear(layers)
    norms: list[nn.Module | None] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]

    def normalised(norm: nn.Module | None, rows: Tensor, count: int) -> Tensor:
        if norm is None:
            return rows
        by_head: Tensor = norm(rows.reshape(-1, count, width))
        return by_head.view(-1, count * width)

    def attended(
        rows: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *_: Any,
        attention_batch: Any,
        kv_cache: Any,
        **others: Any,
    ) -> Tensor:
        cos, sin = (part[0].contiguous() for part in position_embeddings)
        if cos.shape[1] != width:
            raise ValueError(f"{cos.shape[1]} of {width} numbers rotate")
        together = None
        if len(rows) > MOST_ROWS:
            queries, keys, values = (layer(rows) for layer in layers)
        else:
            together = projection(rows)
            queries, keys, values = together.split_with_sizes(sizes, 1)
        if norms == [None, None] and together is not None:
            rotate(together, heads + kv_heads, cos, sin)
        else:
            queries, keys = (
                normalised(norms[0], queries, heads),
                normalised(norms[1], keys, kv_heads),
            )
            rotate(queries, heads, cos, sin)
            rotate(keys, kv_heads, cos, sin)
        output = attend(
            attention_batch,
            kv_cache,
            index,
            queries.unflatten(1, (heads, width)),
            keys.unflatten(1, (kv_heads, width)),
            values.unflatten(1, (kv_heads, spec.value_dim)),
            **options,
        )
        return output.flatten(1)

    return attended


def _decoder_layer(module: nn.Module, model: LoadedModel) -> list[Forward]:
    """x += attention(norm(x)), then x += mlp(norm(x)): what most of today's models repeat."""
    parts = dict(module.named_children())
    norms = [_norm(parts[name]) for name in _LAYER_NORMS if name in parts]
    attention, mlp = parts.get("self_attn"), parts.get("mlp")
    if len(parts) != 4 or len(norms) != 2 or attention is None or mlp is None:
        return []
    attended, gated = _attended(attention, model), _gated(mlp)
    if attended is None or gated is None:
        return []
    after_attention = _added(attention.o_proj)  # type: ignore[arg-type]
    after_mlp = _added(mlp.down_proj)  # type: ignore[arg-type]

    def offer(first: Forward, second: Forward) -> Forward:
        def forward(hidden_states: Tensor, *, position_embeddings: Any, **kwargs: Any) -> Tensor:
            rows = _rows(hidden_states)
            rows = after_attention(attended(first(rows), position_embeddings, **kwargs), rows)
            rows = after_mlp(gated(second(rows)), rows)
            return rows.view(hidden_states.shape)

        return forward

    return [offer(*pair) for pair in zip(*norms, strict=True)]


def _added(layer: nn.Linear) -> Callable[[Tensor, Tensor], Tensor]:
    """layer(rows) + residual."""
    fast = Linear([layer])

    def added(rows: Tensor, residual: Tensor) -> Tensor:
        if len(rows) > MOST_ROWS:
            return residual.add(layer(rows))
        return fast(rows, residual)

    return added
