"""Attention with the kernel of `cpu.c`, which reads the paged cache in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import DecodeRows, Rows
from ..kernels.cpu import PagedAttention
from ..loaded_model import LoadedModel
from .paged import PagedBackend, PagedBatch

SHORT_FLOAT32_CONTEXT = 512
"""Where a context is longer, PyTorch's attention over a float32 prompt is faster than the kernel's
if heads are wide, at 2,048 tokens by half. In bfloat16 it is not at any length tried, up to 2,048.
"""


class CpuBackend(PagedBackend):
    """An AttentionBackend. The kernel takes all tokens, as rows of one, those of prompts too.

    So a token's bits don't depend on how its prompt is cut.
    """

    def __init__(self, model: LoadedModel, block_size: int, *, deterministic: bool = False) -> None:
        """For a model that the kernel handles.

        Args:
            model: The model.
            block_size: Tokens of a block.
            deterministic: Long float32 prompts are the kernel's too.
        """
        super().__init__(model, block_size, PagedAttention)
        self._takes_long = deterministic or model.dtype != torch.float32

    def prepare(self, rows: Rows, slots: Tensor, tables: Tensor, contexts: Tensor) -> PagedBatch:
        too_long = not self._takes_long and rows.contexts.max() > SHORT_FLOAT32_CONTEXT
        if rows.num_decodes == rows.starts.size or too_long:
            return super().prepare(rows, slots, tables, contexts)
        row_of_token, positions = rows.flat
        tables = tables.index_select(0, torch.from_numpy(row_of_token))
        contexts = torch.from_numpy(positions + 1)
        return PagedBatch(slots, DecodeRows(len(contexts), tables, contexts))
