"""Gradients of passes that have none: those of an equivalent pass, which runs again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]


def differentiable(module: nn.Module, fast: Forward, plain: Forward) -> Forward:
    """Return a pass with the bits of `fast` and the gradients of `plain`.

    The backward pass runs `plain` again on the same inputs, with None for `attention_backend`: its
    attention must have gradients itself.

    Args:
        module: The module; its parameters get gradients.
        fast: Returns a tensor, or a tuple that starts with one; all tensors at its start have
            gradients.
        plain: Likewise, equal up to rounding.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        wanted = {name: value for name, value in named.items() if _has_gradient(value)}
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (wanted or parameters):
            return fast(*args, **kwargs)

        def again(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            call = {**named, **dict(zip(wanted, inputs, strict=True))}
            if "attention_backend" in call:
                call["attention_backend"] = None
            return _tensors(
                plain(
                    *(call[place] for place in range(len(args))),
                    **{name: call[name] for name in kwargs},
                )
            )

        def run() -> Any:
            return fast(*args, **kwargs)

        found: list[Any] = []
        outputs: tuple[Tensor, ...] = _Again.apply(  # type: ignore[no-untyped-call]
            run, again, found, len(wanted), *wanted.values(), *parameters
        )
        return (*outputs, *found[0][len(outputs) :]) if isinstance(found[0], tuple) else outputs[0]

    return forward


def _has_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _tensors(output: Any) -> tuple[Tensor, ...]:
    """Return the tensors at the start of a pass's output."""
    outputs = output if isinstance(output, tuple) else (output,)
    return tuple(takewhile(lambda each: isinstance(each, Tensor), outputs))


class _Again(torch.autograd.Function):
    """Forward by one function, backward through an equivalent one."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], Any],
        again: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
        found: list[Any],
        num_inputs: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.again, ctx.num_inputs = again, num_inputs
        found.append(run())
        return _tensors(found[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tensors = ctx.saved_tensors
        inputs = tuple(each.detach().requires_grad_() for each in tensors[: ctx.num_inputs])
        with torch.enable_grad():
            outputs = ctx.again(inputs)[: len(gradients)]
        sources = (*inputs, *tensors[ctx.num_inputs :])
        given = [
            gradient.to(output.dtype) for gradient, output in zip(gradients, outputs, strict=True)
        ]
        found = torch.autograd.grad(outputs, sources, given, allow_unused=True)
        return (None, None, None, None, *found)
