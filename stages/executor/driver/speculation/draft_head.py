"""A draft head as a draft model: an MTP or EAGLE-3 head over the target's hidden states.

The states are kept in blocks beside the head's keys and values, under the target's block numbers.
So a prefix that another sequence has computed has its states. Blocks that came from elsewhere (a
tier, another replica) hold other numbers there, which costs acceptance and no exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from ...runner.interface import IntArray, Rows, StepInputs, Uploader
from .draft_model import DraftModel
from .drafts import NO_DRAFT, Draft, DraftContext


class HeadDrafts(DraftModel):
    """The drafts of a head. Its token p is the sequence's p + 1."""

    # Of drafted tokens it was made from the head's own states.
    _keeps_drafted = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        head: Any = self._runner.model.module
        self._head = head
        self._upload = Uploader(self._runner.model.device)
        self._known_ids: int = head.get_input_embeddings().weight.shape[0]

    @property
    def _states(self) -> Tensor:
        """`[slots, hidden]`."""
        return self.cache.recurrent[0][0].flatten(0, 1)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(contexts)
        # After one token there is no state yet.
        which = [i for i, context in enumerate(contexts) if len(context.tokens) > 1]
        found = super().propose([_after_first(contexts[i]) for i in which])
        for i, draft in zip(which, found, strict=True):
            drafts[i] = draft
        return drafts

    @torch.inference_mode()
    def keep(self, rows: Rows, states: Sequence[Tensor]) -> None:
        """Keep the target's states of a pass; `states`: `[tokens, hidden]` each."""
        if self._broken:
            return
        (slots,) = self._upload(rows.slots(self.cache.block_size))
        with torch._C.DisableTorchFunction(), self._runner.active():
            self._states.index_copy_(0, slots, self._head.fold(states))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks as the target's."""
        self.cache.copy_blocks(pairs)
        sources, destinations = np.array(pairs, np.int64).T
        self._filled[destinations] = self._filled[sources]

    def clear(self) -> None:
        super().clear()
        # A failed pass of the target may have left NaN.
        if not self._states.isfinite().all():
            self.forget_kv()
            self.cache.clear()

    def _pass(self, inputs: StepInputs, batch: Rows, rows: IntArray, ends: IntArray) -> Tensor:
        size, states = self.cache.block_size, self._states
        (slots,) = self._upload(batch.slots(size))
        media = {"input_ids": inputs.input_ids, "states": states[slots][None]}
        output = self._runner.start(replace(inputs, media=media), with_states=True)
        output.wait()
        assert output.states is not None
        # Where the target has no state yet, the head's own is the next input.
        ahead = np.flatnonzero(ends >= self._table.num_computed[rows])
        if ahead.size:
            ends = ends[ahead]
            blocks = self._table.blocks[rows[ahead], ends // size]
            after, places = self._upload(blocks * size + ends % size, ahead)
            states.index_copy_(0, after, output.states[inputs.logits_index[places]])
        logits: Tensor = self._head.spread(output.logits)
        return logits


def _after_first(context: DraftContext) -> DraftContext:
    first, scope = int(context.tokens[0]), context.scope
    return replace(context, tokens=context.tokens[1:], scope=(scope, first))
