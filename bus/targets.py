"""Logprobs of targets in prompts: between the packed form of the bus and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

Logprobs = npt.NDArray[np.float32]


def target_array(token_ids: Sequence[Sequence[int]], packed: bytes) -> Logprobs:
    """Return the logprobs of targets as an array, `[positions, most targets at a position]`.

    Minus infinity stands where nothing was asked for; an impossible token has float32's lowest
    number.

    Args:
        token_ids: The request's `prompt_logprob_token_ids`.
        packed: Completion's `prompt_token_id_logprobs`.
    """
    counts = np.fromiter(map(len, token_ids), np.int64, len(token_ids))
    array = np.full((len(counts), int(counts.max(initial=0))), -np.inf, np.float32)
    ids = np.fromiter(chain.from_iterable(token_ids), np.int64, int(counts.sum()))
    wanted = np.zeros(array.shape, np.bool_)
    wanted[np.arange(array.shape[1]) < counts[:, None]] = ids >= 0
    array[wanted] = np.frombuffer(packed, "<f4")
    return array


def packed_targets(array: npt.NDArray[Any] | None) -> bytes | None:
    """Return the packed form of such an array."""
    return None if array is None else array[array > -np.inf].astype("<f4").tobytes()
