"""Multi-head latent attention (MLA, DeepSeek-V2 and later) with the latent in the KV cache.

An MLA layer makes two things of each token: a normed latent c, and a rotated key part r that all
heads share. Transformers' `expand_kv` multiplies the latent with `kv_b_proj`, whose rows are, head
by head, U for keys and V for values: a head's key is [U c | r], its value V c. Kept so, a token of
DeepSeek-V3 takes 5 MB. Here the cache keeps [c | r], 70 KB, as one KV head whose value is c. Since

    q U c = (U^T q) c    and    sum of w V c = V (sum of w c),

U is multiplied with the query instead ("absorbed"), and V with the attention's output. So they are
in prompts too: a token's bits don't depend on how its prompt is cut.

Within our attention functions only, an instance's `expand_kv` returns [c | r] and c. Other callers
of the module, such as a trainer that shares it, run Transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .....config import ModelError
from ..adapters.layers import AdaptedLinear
from ..linear.choose import method_of
from ..linear.dense import DenseLinear
from .backend import PREFIX

MultiplyHeads = Callable[[Tensor, Tensor, Tensor], None]
"""As `AttentionBackend.multiply_heads`."""

_PARTS = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "expand_kv", "config")
_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_TOLERANCES = {torch.bfloat16: 0.02, torch.float16: 0.0025, torch.float32: 1e-5}
"""The largest relative difference from `expand_kv`; rounding makes about a fifth of it."""


class LatentAttention:
    """An MLA module's `expand_kv` for our attention functions, and the products in its place.

    `kv_b_proj` is read in each call, so that weight updates, new parameters of a trainer and
    adapters have effect at once.

    Attributes:
        rank: Width of the latent, and so of the values in the cache.
        value_dim: Width of a head's output.
    """

    def __init__(self, module: Any) -> None:
        """`module`: has the parts of MLA."""
        self._module = module
        self.rank, self._key_dim, self._rotated, self.value_dim = (
            getattr(module, name) for name in _WIDTHS
        )

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[1, 1, tokens, rank + rotated]` and the latent in it; for other attention
        functions, the keys and values of all heads."""
        if not self._module.config._attn_implementation.startswith(PREFIX):
            return self.expand(latent, rotated)
        both = torch.cat((latent, rotated), dim=-1)
        return both, both[..., : self.rank]

    def expand(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all heads, as Transformers does."""
        expanded: tuple[Tensor, Tensor] = type(self._module).expand_kv(
            self._module, latent, rotated
        )
        return expanded

    @property
    def weight(self) -> Tensor:
        """The weight of `kv_b_proj`.

        Raises:
            ModelError: The module has been replaced since the model was loaded.
        """
        projection = self._module.kv_b_proj
        if not isinstance(method_of(projection), DenseLinear):
            raise ModelError(
                f"kv_b_proj has become a {type(projection).__name__} since the model was loaded; "
                "set engine.latent_attention to 'off'"
            )
        weight: Tensor = projection.weight
        return weight

    @property
    def matrices(self) -> Tensor:
        """U and V of each head, one below the other: `[heads, key_dim + value_dim, rank]`."""
        return self._by_head(self.weight)

    def _by_head(self, weight: Tensor) -> Tensor:
        return weight.view(-1, self._key_dim + self.value_dim, self.rank)

    def expand_by(self, both: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, `[1, heads, tokens, ...]`, with gradients.

        Args:
            both: `[1, 1, tokens, rank + rotated]`.
            weight: That of `kv_b_proj`.
        """
        latent, rotated = both.split_with_sizes((self.rank, self._rotated), dim=-1)
        expanded = latent @ self._by_head(weight).mT
        keys, values = expanded.split_with_sizes((self._key_dim, self.value_dim), dim=-1)
        return torch.cat((keys, rotated.expand(-1, keys.shape[1], -1, -1)), dim=-1), values

    def absorb(self, queries: Tensor, multiply: MultiplyHeads) -> Tensor:
        """`[tokens, heads, key_dim + rotated]` to queries for the cache,
        `[tokens, heads, rank + rotated]`."""
        tokens, heads, _ = queries.shape
        plain, rotated = queries.split_with_sizes((self._key_dim, self._rotated), dim=-1)
        output = queries.new_empty(tokens, heads, self.rank + self._rotated)
        absorbed = output[..., : self.rank]
        multiply(plain, self.matrices[:, : self._key_dim], absorbed)
        output[..., self.rank :] = rotated
        for tokens_of, a, b in self._adapters():
            keys = b[:, :, : self._key_dim].transpose(1, 2).contiguous()
            hidden = plain.new_empty(*plain[tokens_of].shape[:2], a.shape[0])
            multiply(plain[tokens_of].contiguous(), keys, hidden)
            absorbed[tokens_of] += F.linear(hidden, a.t())
        return output

    def project(self, attended: Tensor, multiply: MultiplyHeads) -> Tensor:
        """Weighted latents, `[tokens, heads, rank]`, to outputs `[tokens, heads, value_dim]`."""
        tokens, heads, _ = attended.shape
        output = attended.new_empty(tokens, heads, self.value_dim)
        multiply(attended, self.matrices[:, self._key_dim :].transpose(1, 2), output)
        for tokens_of, a, b in self._adapters():
            hidden = F.linear(attended[tokens_of], a)
            added = torch.empty_like(output[tokens_of])
            multiply(hidden, b[:, :, self._key_dim :].contiguous(), added)
            output[tokens_of] += added
        return output

    def _adapters(self) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
        """Iterate over the step's adapters of `kv_b_proj`: their tokens, A as `[ranks, rank]`, and
        B as `[heads, ranks, key_dim + value_dim]`."""
        forward = vars(self._module.kv_b_proj).get("forward")
        adapted = getattr(forward, "__self__", None)
        if isinstance(adapted, AdaptedLinear):
            for index, (a, b) in adapted.pairs():
                whole = torch.cat(tuple(b), dim=-1)
                by_head = whole.view(len(a), -1, self._key_dim + self.value_dim)
                yield index, a, by_head.transpose(0, 1)


def keep_latents(module: nn.Module, unwanted: str) -> str:
    """Let the MLA modules of a model leave their latents to our attention functions.

    A module is found by its parts. It is compared with its own `expand_kv`, and unchanged if they
    disagree.

    Args:
        module: The model.
        unwanted: Why none is changed; "" to change them.

    Returns:
        "in use", or why some of the modules are unchanged; "" if there are none.
    """
    result = ""
    for part in module.modules():
        if not all(hasattr(part, name) for name in (*_PARTS, *_WIDTHS)):
            continue
        why = unwanted or _why_not(part)
        if why:
            vars(part).pop("expand_kv", None)  # of an engine that shared the model before
        elif "expand_kv" not in vars(part):
            part.expand_kv = LatentAttention(part)  # type: ignore[assignment]
        if why or not result:
            result = why or "in use"
    return result


def forget_latents(module: nn.Module) -> None:
    """Give the modules their own `expand_kv` back: a cycle would keep them in memory."""
    for part in module.modules():
        vars(part).pop("expand_kv", None)


@torch.no_grad()
def _why_not(module: Any) -> str:
    """Return why a module keeps its own `expand_kv`; "" if the products agree with it."""
    projection, name = module.kv_b_proj, type(module).__name__
    if not isinstance(method_of(projection), DenseLinear) or projection.bias is not None:
        return f"kv_b_proj of {name} is no plain linear layer"
    weight = projection.weight
    shape = weight.shape[0] % (module.qk_nope_head_dim + module.v_head_dim), weight.shape[1]
    if shape != (0, module.kv_lora_rank) or not weight.is_contiguous():
        return f"kv_b_proj of {name} has the shape {tuple(weight.shape)}"
    made = LatentAttention(module)
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        numbers = torch.randn(1, 1, 4, width, generator=generator)
        return numbers.to(weight.device, weight.dtype)

    latent, rotated = draw(module.kv_lora_rank), draw(module.qk_rope_head_dim)
    offers = made.expand_by(torch.cat((latent, rotated), dim=-1), weight)
    if all(map(_agree, offers, made.expand(latent, rotated))):
        return ""
    return f"expand_kv of {name} computes something else"


def _agree(offered: Tensor, wanted: Tensor) -> bool:
    if offered.shape != wanted.shape:
        return False
    difference = (offered.float() - wanted.float()).norm()
    tolerance = _TOLERANCES.get(wanted.dtype, _TOLERANCES[torch.float32])
    return bool(difference <= tolerance * wanted.float().norm())
