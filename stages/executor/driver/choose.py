"""From the model's logits to tokens, with everything that a request can ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....bus.messages import TopLogprobs
from ..runner.interface import IntArray
from .adjust import adjust_logits
from .constraints import PendingMasks
from .logprobs import gather_logprobs
from .report import report_top_logprobs
from .sampling import sample_rows, uniforms
from .sequences import Places, SequenceTable


def choose_tokens(
    model_logits: Tensor,
    table: SequenceTable,
    places: Places,
    *,
    raw: bool,
    kernels: bool,
    masks: PendingMasks | None = None,
) -> tuple[Tensor, Tensor, tuple[TopLogprobs, ...]]:
    """Chooses a token for each place, and reports it in the configured mode.

    Args:
        model_logits: `[batch, vocab]` float32; changed unless `raw`.
        table: The sequences.
        places: `[batch]`, where each row of logits is.
        raw: Whether logprobs are of the model's own output.
        kernels: As in `scale_logits`.
        masks: What `Constraints.begin` gave for these places.

    Returns:
        Tokens and logprobs, `[batch]` each on the device, and the likeliest tokens as
        `report_top_logprobs` gives them.

    Raises:
        ModelError: The model's output is broken.
    """
    device = model_logits.device

    def upload(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    rows = places.rows
    logits = adjust_logits(model_logits, table, places)
    if masks is not None:
        if raw and logits is model_logits:
            logits = logits.clone()
        masks.result().apply(logits, kernels=kernels)
    temperature = table.temperature[rows]
    temperatures = upload(temperature)
    numbers = None
    if temperature.any():
        numbers = upload(uniforms(table.seed[rows], table.num_generated[rows] + places.ahead))
    top_k, top_p, min_p = table.top_k[rows], table.top_p[rows], table.min_p[rows]
    tokens, logprobs = sample_rows(
        logits,
        temperatures,
        uniforms=numbers,
        top_k=upload(top_k) if top_k.any() else None,
        top_p=upload(top_p) if (top_p < 1).any() else None,
        min_p=upload(min_p) if min_p.any() else None,
        kernels=kernels,
    )
    if raw:
        logits, temperatures = model_logits, torch.ones_like(temperatures)
        logprobs = gather_logprobs(logits, temperatures, tokens[:, None], kernels=kernels)[:, 0]
    counts = table.num_logprobs[rows]
    return tokens, logprobs, report_top_logprobs(logits, temperatures, counts, kernels=kernels)


def packed_sampling(table: SequenceTable, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Temperatures and uniform numbers of rows, `[batch]` each: float64 as the same bits of int64.

    So they can travel with other numbers; `.view(torch.float64)` makes them what they were.
    """
    temperatures = table.temperature[rows].astype(np.float64)
    numbers = uniforms(table.seed[rows], table.num_generated[rows])
    return temperatures.view(np.int64), numbers.view(np.int64)
