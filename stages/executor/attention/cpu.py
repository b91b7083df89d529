"""Attention with the kernel of `cpu.c`, which reads the paged cache in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import DecodeRows, Rows
from ..kernels.cpu import PagedAttention
from ..loaded_model import LoadedModel
from .paged import PagedBackend, PagedBatch

SHORT_CONTEXT = 512
"""Contexts of at most so many tokens are read token by token."""


class CpuBackend(PagedBackend):
    """An AttentionBackend. Where contexts are short the kernel takes all tokens, as rows of one.

    A matrix product for so few keys costs more than it saves.
    """

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        """For a model that the kernel handles."""
        super().__init__(model, block_size, PagedAttention)

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> PagedBatch:
        if rows.num_decodes == rows.starts.size or rows.contexts.max() > SHORT_CONTEXT:
            return super().prepare(rows, slots, tables, contexts)
        row_of_token, positions = rows.flat
        tables = tables.index_select(0, torch.from_numpy(row_of_token))
        contexts = torch.from_numpy(positions + 1)
        return PagedBatch(slots, DecodeRows(len(contexts), tables, contexts))
