"""Attention with the kernel of `cpu.c`, which reads the paged cache in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import DecodeRows, Rows
from ..kernels.cpu import PagedAttention
from ..loaded_model import LoadedModel
from .paged import PagedBackend, PagedBatch, ReadRows


class CpuBackend(PagedBackend):
    """An AttentionBackend. The kernel takes all tokens, as rows of one, those of prompts too.

    So a token's bits don't depend on how its prompt is cut.
    """

    def __init__(self, model: LoadedModel, block_size: int) -> None:
        """For a model that the kernel handles, and blocks of so many tokens."""
        super().__init__(model, block_size, PagedAttention)

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> PagedBatch:
        if rows.num_decodes == rows.starts.size:
            return super().prepare(rows, slots, tables, contexts)
        row_of_token, positions = rows.flat
        of_token = tables.index_select(0, torch.from_numpy(row_of_token))
        contexts = torch.from_numpy(positions + 1)
        read: ReadRows | None = None
        if rows.read is not None and 2 * len(rows.read) <= len(positions):
            index = torch.from_numpy(rows.read)
            some = DecodeRows(
                len(rows.read), of_token.index_select(0, index), contexts.index_select(0, index)
            )
            read = ReadRows(index, some)
        return PagedBatch(slots, DecodeRows(len(contexts), of_token, contexts), read=read)
