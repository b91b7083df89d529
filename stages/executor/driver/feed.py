"""Tokens on their way: from the step that sampled them to the next one, and to the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..runner.interface import IntArray
from .sampling import sample_plain


class TokenFeed:
    """The last sampled token of each row of the SequenceTable, on the device.

    While a token is only here, the table has `placeholders` of its row in its place. The next step
    takes them as input ids, and `resolve` turns them into tokens without the host.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self._tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    @property
    def padding_row(self) -> int:
        """A row that belongs to no sequence: what only pads a batch puts its token there."""
        return self.rows

    def enlarge(self, rows: int) -> None:
        """Makes room for more rows, in another tensor, and moves the padding row."""
        before, self._tokens = self._tokens, self._tokens.new_zeros(rows + 1)
        self._tokens[: self.rows] = before[: self.rows]
        self.rows = rows

    def put(self, rows: Tensor, tokens: Tensor) -> None:
        """Takes the tokens of rows, `[batch]` int64 each, on the device."""
        self._tokens.index_copy_(0, rows, tokens)

    def choose(
        self, rows: Tensor, logits: Tensor, temperatures: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sample the next token of each row as `sample_plain`, and keep it."""
        tokens, logprobs = sample_plain(logits, temperatures, uniforms)
        self.put(rows, tokens)
        return tokens, logprobs

    def resolve(self, input_ids: Tensor) -> Tensor:
        """The ids with each placeholder replaced by the token that it stands for."""
        sampled = self._tokens[(-1 - input_ids).clamp_(min=0)]
        return torch.where(input_ids < 0, sampled, input_ids)


def placeholders(rows: IntArray) -> IntArray:
    """What stands in the SequenceTable for the tokens of rows that are only on the device."""
    return -1 - rows


class Readback:
    """Tokens and logprobs of one step, on their way to the host.

    On CUDA the copy is queued behind the step and nobody waits for it before `numbers` is called.
    """

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Takes `[rows]` int64 and `[rows]` float32, which the next step may overwrite."""
        self._arrived: torch.cuda.Event | None = None
        if tokens.device.type == "cpu":
            self._host = tokens.clone(), logprobs.clone()
            return
        # As float64 both fit into one copy; a token id is exact up to 2**53.
        packed = torch.stack((tokens.double(), logprobs.double()))
        staged = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        staged.copy_(packed, non_blocking=True)
        self._host = staged[0], staged[1]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record(torch.cuda.current_stream(tokens.device))

    def wait(self) -> None:
        """Blocks until the step is done. The one method that another thread may call."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def numbers(self) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """Tokens and logprobs, `[rows]` each; waits for them."""
        self.wait()
        tokens, logprobs = self._host
        if self._arrived is None:
            return tokens.numpy(), logprobs.numpy()
        return tokens.numpy().astype(np.int64), logprobs.numpy().astype(np.float32)
