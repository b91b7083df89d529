"""Steps that belong to no sequence, to measure the time that steps take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ..runner.interface import ModelRunner, Rows
from .sampling import NO_LIMITS, sample_plain, sample_rows


def trial_step(runner: ModelRunner) -> Callable[[int, int], object]:
    """Return a step of any number of rows that belong to no sequence, to measure.

    The step runs the model and samples. It writes to the padding block of the KV cache only, and to
    state slots, so no sequence may have one. It draws no random numbers. Other costs of a row are
    small; `StepCosts.observe` measures them.
    """
    model, cache = runner.model, runner.cache

    @torch.inference_mode()
    def step(count: int, context: int) -> list[int]:
        ones = np.ones(count, np.int64)
        width = -(-context // cache.block_size)
        rows = Rows((context - 1) * ones, ones, np.full((count, width), cache.padding_block), count)
        if model.mixers is not None:
            rows = replace(rows, states=np.arange(count) % cache.num_slots)
        # Different tokens, since an expert that all rows have chosen would be read only once.
        ids = np.arange(count) * 7919 % model.vocab_size
        logits = runner.forward(runner.builder.build(rows, ids, np.arange(count)))
        temperatures = torch.ones(count, device=logits.device)
        numbers = torch.full_like(temperatures, 0.5, dtype=torch.float64)
        if logits.device.type == "cuda":
            tokens, _ = sample_plain(logits, temperatures, numbers)
        else:
            kernels = runner.kernels
            tokens = sample_rows(logits, temperatures, numbers, NO_LIMITS, kernels=kernels).tokens
        return tokens.tolist()

    return step
