"""Gradients for fast passes: forward by the kernels, backward through the module's own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .patterns import Forward


def differentiable(module: nn.Module, fast: Forward, plain: Forward) -> Forward:
    """A pass with the bits of `fast`, and the gradients of `plain`.

    Backward, `plain` runs again on the same inputs, so only these are kept. It gets None for
    `attention_backend`, where it is called with one: its attention must have gradients itself.

    Args:
        module: Whose passes they are; its parameters get gradients.
        fast: Gives a tensor, or one first in a tuple.
        plain: Likewise, within rounding.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        wanted = {name: value for name, value in named.items() if _has_gradient(value)}
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (wanted or parameters):
            return fast(*args, **kwargs)

        def again(inputs: tuple[Tensor, ...]) -> Tensor:
            call = {**named, **dict(zip(wanted, inputs, strict=True))}
            if "attention_backend" in call:
                call["attention_backend"] = None
            return _first(
                plain(
                    *(call[place] for place in range(len(args))),
                    **{name: call[name] for name in kwargs},
                )
            )

        def run() -> Any:
            return fast(*args, **kwargs)

        found: list[Any] = []
        output: Tensor = _Again.apply(  # type: ignore[no-untyped-call]
            run, again, found, len(wanted), *wanted.values(), *parameters
        )
        return (output, *found[0][1:]) if isinstance(found[0], tuple) else output

    return forward


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


class _Again(torch.autograd.Function):
    """Forward by one function, backward through another that computes the same."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], Any],
        again: Callable[[tuple[Tensor, ...]], Tensor],
        found: list[Any],
        num_inputs: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.again, ctx.num_inputs = again, num_inputs
        found.append(run())
        return _first(found[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensors = ctx.saved_tensors
        inputs = tuple(each.detach().requires_grad_() for each in tensors[: ctx.num_inputs])
        with torch.enable_grad():
            output = ctx.again(inputs)
        sources = (*inputs, *tensors[ctx.num_inputs :])
        (gradient,) = gradients
        found = torch.autograd.grad(output, sources, gradient.to(output.dtype), allow_unused=True)
        return (None, None, None, None, *found)
