"""Columns of tokens: a value of an optional feature for each sampled token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import Any

from ..sections import Section

Columns = Mapping[str, tuple[Any, ...]]
"""By name, the values of some tokens; None for a token whose request lacks the feature.

A name is that of the field in CompletionChunk and CompletionSample (`public.TOKEN_COLUMNS`).
"""

NO_COLUMNS: Columns = {}

SUPPORT_LOGPROBS, SAMPLING_MASKS = "support_logprobs", "sampling_masks"

MASK_DTYPE = "<i4"
"""Of the ids in a sampling mask, as numpy names it."""


def columns_of(columns: Columns, kept: Iterable[Any]) -> Columns:
    """Return the columns of those tokens for which `kept`, `[rows]`, is true."""
    return {name: tuple(compress(values, kept)) for name, values in columns.items()}


class TokenColumns(Section, frozen=True):
    """In StepResult: the columns of its tokens, `[rows]` each."""

    columns: dict[str, tuple[Any, ...]]
