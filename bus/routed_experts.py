"""Routed experts as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .parts.experts import EXPERTS_DTYPE
from .public import Completion, CompletionSample, RoutedExperts


def experts_of_sample(
    completion: Completion, sample: CompletionSample
) -> npt.NDArray[np.uint16] | None:
    """Return `[tokens - 1, layers, top_k]`: the experts of each token of prompt and sample but the
    last, from the position on at which those of the prompt begin; None if they are not known."""
    prompt, own = completion.prompt_routed_experts, sample.routed_experts
    if prompt is None or own is None:
        return None
    packed = np.frombuffer(prompt.data + b"".join(own), EXPERTS_DTYPE)
    return packed.reshape(-1, prompt.layers, prompt.top_k)


def packed_experts(
    array: npt.NDArray[Any] | None, num_tokens: int, num_prompt_tokens: int
) -> tuple[RoutedExperts | None, tuple[bytes, ...] | None]:
    """Return the parts of a prompt and of a sample of so many tokens; None without experts."""
    if array is None:
        return None, None
    split = len(array) - num_tokens
    packed = array.astype(EXPERTS_DTYPE)
    prompt = RoutedExperts(
        first=num_prompt_tokens - 1 - split,
        layers=array.shape[1],
        top_k=array.shape[2],
        data=packed[:split].tobytes(),
    )
    return prompt, tuple(each.tobytes() for each in packed[split:])
