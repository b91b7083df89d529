"""Tensors of what samples have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .....kserve.tensors import DTYPES, Datatype, NamedTensor
from .parts import Part


def texts(name: str, found: Sequence[str]) -> NamedTensor:
    """BYTES `[number of texts]`, in UTF-8."""
    data = np.empty(len(found), np.object_)
    # What a tokenizer makes of broken bytes may be no Unicode.
    data[:] = [text.encode(errors="replace") for text in found]
    return NamedTensor(name, data)


def numbers(name: str, datatype: Datatype, found: Sequence[float]) -> NamedTensor:
    """`[number of numbers]`."""
    return NamedTensor(name, np.array(found, DTYPES[datatype]))


def rows(
    name: str, datatype: Datatype, found: Sequence[Sequence[float]], padding: float
) -> NamedTensor:
    """`[rows, longest]`: a row for each sample, padded behind its end."""
    data = np.full((len(found), max(map(len, found))), padding, DTYPES[datatype])
    for row, values in zip(data, found, strict=True):
        row[: len(values)] = values
    return NamedTensor(name, data)


def finish_reasons(name: str, parts: Sequence[Part]) -> NamedTensor:
    """BYTES `[samples]`; of one that goes on "None", as vLLM's backend has it."""
    return texts(name, [str(part.finish_reason) for part in parts])


def counts(name: str, parts: Sequence[Part]) -> NamedTensor:
    """UINT32 `[samples]`: the tokens of each part."""
    return numbers(name, "UINT32", [len(part.token_ids) for part in parts])
