"""A draft model: a smaller one of the same vocabulary, which writes on ahead of the target.

It samples with the very numbers that the target will take at these places, from what temperature
and limits leave of its own distribution: so where the two distributions agree, the tokens are the
same, also at temperature 1.

Its keys and values lie in blocks of a cache of its own, under the numbers of the target's block
tables: so what batching decides for the one holds for the other. A sequence begins with nothing
computed, and what it computes it writes, also into blocks that it shares: whoever shares one has
the same tokens there. It reads no place of its own that it has not written, or found written for
the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .....config import EngineConfig, ModelError
from .....text.tokenizer import find_tokenizer
from ...runner.interface import (
    FastModules,
    InputBuilder,
    IntArray,
    KVCache,
    LoadedModel,
    Rows,
    choose_backend,
    flatten_rows,
    load_model,
    model_forward,
    order_rows,
)
from ..choose import choose_tokens
from ..sequences import Places, SequenceTable
from .drafts import NO_DRAFT, Draft, DraftContext

_FIRST_LENGTH = 4
"""Tokens of a sequence's first draft."""

_UNSURE = 0.3
"""A token that is chosen as the likeliest, and is less likely than this, is the draft's last."""

_MOST_SKIPPED = 64
"""How many steps a sequence goes without a draft at most, however many were wrong."""

_FEW_TOKENS = 8
"""Tokens of a row up to which it runs as so many rows of one token, which kernels take."""

_SAME_SHARE = 0.99
"""Of the target's tokens, how many must have the same id in the draft model's tokenizer."""


def drafts_by_model(config: EngineConfig) -> bool:
    """Whether there is to be a draft model."""
    return config.speculation == "auto" and bool(config.draft_model_path)


def load_draft_model(config: EngineConfig, target: LoadedModel) -> LoadedModel:
    """Loads the model of `engine.draft_model_path`, before memory is dealt out.

    Raises:
        ModelError: It can't be loaded, or is none that can draft for the target.
    """
    if not target.generates:
        raise ModelError(
            "the model makes embeddings and generates nothing that could be drafted; set "
            "draft_model_path to ''"
        )
    try:
        model = load_model(draft_config(config))
    except ModelError as error:
        raise ModelError(f"the draft model: {error.message}") from error
    if not model.generates:
        raise ModelError(
            "the draft model makes embeddings and generates nothing; set draft_model_path to one "
            "that generates"
        )
    _check_vocabulary(config, model, target)
    return model


def draft_config(config: EngineConfig) -> EngineConfig:
    """The settings of the draft model, which are the target's but for what needs no exactness."""
    return msgspec.structs.replace(
        config,
        model_path=config.draft_model_path,
        draft_model_path="",
        deterministic=False,
        attention="auto",
        attention_tile=0,
    )


def _check_vocabulary(config: EngineConfig, model: LoadedModel, target: LoadedModel) -> None:
    """Raises ModelError if tokens mean something else to the two models."""
    own, wanted = (_token_ids(each.model_folder) for each in (draft_config(config), config))
    if own and wanted:
        # Models of one family differ in a few special tokens, and in how far rows are padded.
        same = sum(own.get(token) == token_id for token, token_id in wanted.items())
        if same >= _SAME_SHARE * len(wanted):
            return
        difference = f"of the {len(wanted)} tokens it has {same} under the same id"
    elif model.vocab_size == target.vocab_size:
        return
    else:
        difference = f"it has {model.vocab_size} tokens and the model has {target.vocab_size}"
    raise ModelError(
        f"the draft model is of another vocabulary: {difference}; set draft_model_path to one "
        "with the same tokenizer"
    )


def _token_ids(folder: Path) -> dict[str, int]:
    tokenizer = find_tokenizer(folder)
    return {} if tokenizer is None else tokenizer.get_vocab()


@dataclass(slots=True)
class _Progress:
    """How far the draft model is with one sequence.

    Attributes:
        seq_id: Whose row it is.
        num_computed: How many tokens, from the first on, have their KV in the draft model's cache.
        hashes: Of the tokens up to the end of each block that is computed.
        drafted: Its last draft.
        start: The place of the first of these in the sequence.
        length: How many tokens the next draft may have.
        misses: How many drafts in a row were of no use.
        skips: How many steps are to be gone without a draft.
    """

    seq_id: int
    num_computed: int = 0
    hashes: list[int] = field(default_factory=list)
    drafted: tuple[int, ...] = ()
    start: int = 0
    length: int = _FIRST_LENGTH
    misses: int = 0
    skips: int = 0

    def settle(self, tokens: IntArray) -> None:
        """Compares the last draft with what has come; of what is wrong, nothing is computed."""
        if not self.drafted:
            return
        came = tokens[self.start : self.start + len(self.drafted)]
        differs = came != np.array(self.drafted[: len(came)], np.int64)
        right = int(differs.argmax()) if differs.any() else len(came)
        self.num_computed = min(self.num_computed, self.start + right)
        if right == len(self.drafted):
            self.length += 2
        elif right < len(came):
            self.length = right + 1
        if right and len(tokens) - self.start > 1:
            self.misses = 0
        elif len(came):
            # Wrong, or verified by nobody, who has better use for the step's time. It will hardly
            # be otherwise at the next place.
            self.misses += 1
            self.skips = min(2**self.misses - 2, _MOST_SKIPPED)
        self.drafted = ()


class DraftModel:
    """A DraftSource. Its methods run on the thread of the target, between its passes.

    Attributes:
        model: The draft model, which no update of weights changes.
        cache: Its keys and values; `forget_kv` must be called when they are lost.
        failure: Why it drafts no more, as long as nobody has been told; empty else.
    """

    name: ClassVar[str] = "model"

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        table: SequenceTable,
        num_blocks: int,
        vocab_size: int,
    ) -> None:
        """Allocates its cache, and makes it ready to run.

        Args:
            config: Of the lane.
            model: As `load_draft_model` gave it.
            table: The target's sequences.
            num_blocks: Of the target's cache.
            vocab_size: The target's.
        """
        own = draft_config(config)
        self.model = model
        huge = config.huge_pages == "auto"
        self.cache = KVCache(model, num_blocks, config.block_size, huge_pages=huge)
        self._table = table
        self._most_tokens = config.max_tokens_per_batch
        self._vocab_size = vocab_size
        backend, without_kernels = choose_backend(own, model)
        self._builder = InputBuilder(model, config.block_size, backend)
        self._fast: FastModules | None = None
        if model.device.type == "cpu" and not without_kernels:
            self._fast = FastModules(model, self.cache, self._builder)
        self._active: Callable[[], AbstractContextManager[object]] = nullcontext
        if self._fast is not None:
            self._active = self._fast.active
        self._progress: dict[int, _Progress] = {}
        # Of each block, the hash of the tokens up to its end whose KV it has; 0 for none.
        self._filled: IntArray = np.zeros(num_blocks, np.int64)
        self._broken = False
        self.failure = ""

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """As `DraftSource.propose`.

        A sequence that it has not seen before, or not for long, it reads first; of many tokens so
        many in a step as a batch may have, and till then there is no draft.
        """
        drafts = [NO_DRAFT] * len(contexts)
        if self._broken:
            return drafts
        lengths = [self._length(context) for context in contexts]
        wanted = [i for i, length in enumerate(lengths) if length > 0]
        if not wanted:
            return drafts
        try:
            # The calls of torch are its own, whatever the target's have to be.
            with torch._C.DisableTorchFunction(), self._active():
                ready, logits = self._catch_up([contexts[i] for i in wanted])
                chosen = [wanted[i] for i in ready]
                written = self._write_on(
                    [contexts[i] for i in chosen], [lengths[i] for i in chosen], logits
                )
        except Exception as error:  # noqa: BLE001  (drafts may be left out; no request is to suffer)
            self._give_up(error)
            return drafts
        for i, draft in zip(chosen, written, strict=True):
            drafts[i] = draft
        return drafts

    def forget(self, row: int, seq_id: int) -> None:
        """As `DraftSource.forget`; the blocks that it filled are found again."""
        if (progress := self._progress.get(row)) is not None and progress.seq_id == seq_id:
            del self._progress[row]

    def clear(self) -> None:
        """As `DraftSource.clear`."""
        self._progress.clear()
        self._broken = False

    def forget_kv(self) -> None:
        """The cache has been emptied, or has other memory."""
        self._progress.clear()
        self._filled[:] = 0

    def close(self) -> None:
        """Gives up weights and KV; the object is of no use then."""
        if self._fast is not None:
            self._fast.remove()
        self._active = nullcontext
        del self.model, self.cache, self._fast, self._builder

    # --- inside -------------------------------------------------------------------------------

    def _give_up(self, error: Exception) -> None:
        """It drafts no more. A device that is lost is found out here, or by the target's pass."""
        self._broken = True
        self.failure = error.message if isinstance(error, ModelError) else repr(error)
        self.forget_kv()
        # What are no numbers would spoil whoever gets the block.
        self.cache.clear()

    def _length(self, context: DraftContext) -> int:
        """How many tokens to draft; 0 where it is not worth a pass, or there is no room."""
        progress = self._progress.get(context.row)
        if progress is None or progress.seq_id != context.seq_id:
            progress = self._progress[context.row] = self._begin(context)
        progress.settle(context.tokens)
        if progress.skips:
            progress.skips -= 1
            return 0
        # A pass less than tokens: the last one's KV is not needed.
        blocks = int(self._table.num_blocks[context.row]) * self.cache.block_size
        room = min(blocks, self.model.max_model_len) - len(context.tokens) + 1
        return min(progress.length, context.limit, room)

    def _begin(self, context: DraftContext) -> _Progress:
        """A sequence's start, behind the blocks that are filled with its tokens already."""
        progress = _Progress(context.seq_id)
        size = self.cache.block_size
        # Its last token is computed in any case.
        whole = (len(context.tokens) - 1) // size
        self._hash(progress, context, whole)
        blocks = self._table.blocks[context.row, :whole]
        same = self._filled[blocks] == np.array(progress.hashes, np.int64)
        found = whole if same.all() else int(same.argmin())
        del progress.hashes[found:]
        progress.num_computed = found * size
        return progress

    def _hash(self, progress: _Progress, context: DraftContext, num_blocks: int) -> None:
        """Lengthens `hashes` to so many blocks."""
        hashes, size = progress.hashes, self.cache.block_size
        before = hashes[-1] if hashes else hash(context.scope)
        for block in range(len(hashes), num_blocks):
            part = context.tokens[block * size : (block + 1) * size]
            before = hash((before, part.tobytes()))
            hashes.append(before)

    def _note(self, context: DraftContext, stop: int) -> None:
        """Before tokens up to `stop` are computed: which blocks are filled, and which no more."""
        progress, size = self._progress[context.row], self.cache.block_size
        blocks = self._table.blocks[context.row]
        done, before = progress.num_computed // size, len(progress.hashes)
        self._hash(progress, context, done)
        self._filled[blocks[before:done]] = progress.hashes[before:done]
        self._filled[blocks[done : -(-stop // size)]] = 0

    def _catch_up(self, contexts: Sequence[DraftContext]) -> tuple[list[int], Tensor | None]:
        """Computes what came since the last time.

        Returns:
            Which contexts have all of it, and their logits, `[ready, vocab]`; None if none has.
        """
        pending = []
        for context in contexts:
            progress = self._progress[context.row]
            progress.num_computed = min(progress.num_computed, len(context.tokens) - 1)
            pending.append(len(context.tokens) - progress.num_computed)
        left = self._most_tokens
        taken: dict[int, int] = {}
        # The shortest first, so that a long prompt keeps nobody waiting.
        for i in sorted(range(len(contexts)), key=pending.__getitem__):
            if count := min(pending[i], left):
                taken[i] = count
                left -= count
        chosen = [contexts[i] for i in taken]
        counts = np.array(list(taken.values()), np.int64)
        starts = np.array([self._progress[c.row].num_computed for c in chosen], np.int64)
        for context, stop in zip(chosen, (starts + counts).tolist(), strict=True):
            self._note(context, stop)
        ids = [
            context.tokens[start : start + count]
            for context, start, count in zip(chosen, starts, counts, strict=True)
        ]
        rows = np.array([context.row for context in chosen], np.int64)
        logits = self._forward(rows, starts, counts, np.concatenate(ids))
        for context, stop in zip(chosen, (starts + counts).tolist(), strict=True):
            self._progress[context.row].num_computed = stop
        ready = [place for place, i in enumerate(taken) if taken[i] == pending[i]]
        whole = [i for i in taken if taken[i] == pending[i]]
        return whole, logits[ready] if ready else None

    def _write_on(
        self, contexts: Sequence[DraftContext], lengths: Sequence[int], logits: Tensor | None
    ) -> list[Draft]:
        """Drafts for sequences whose known tokens are computed, from the logits behind these."""
        if logits is None:
            return []
        table = self._table
        rows = np.array([context.row for context in contexts], np.int64)
        known = np.array([len(context.tokens) for context in contexts], np.int64)
        wanted = np.array(lengths, np.int64)
        for context, length in zip(contexts, lengths, strict=True):
            self._note(context, len(context.tokens) + length - 1)
        tokens: list[list[int]] = [[] for _ in contexts]
        likelihoods: list[list[float]] = [[] for _ in contexts]
        running = np.arange(len(contexts))
        for place in range(int(wanted.max())):
            sampled, chances = self._choose(logits, rows[running], place)
            for i, token, chance in zip(running, sampled.tolist(), chances, strict=True):
                tokens[i].append(token)
                likelihoods[i].append(chance)
            goes_on = [
                place + 1 < wanted[i]
                and token not in table.stop_ids[rows[i]]
                and (chance >= _UNSURE or table.temperature[rows[i]] > 0)
                for i, token, chance in zip(running, sampled.tolist(), chances, strict=True)
            ]
            table.write_tokens(rows[running], known[running] + place, sampled)
            running, sampled = running[goes_on], sampled[goes_on]
            if not running.size:
                break
            starts = known[running] + place
            logits = self._forward(rows[running], starts, np.ones_like(starts), sampled)
        drafts = []
        for context, ids, chances in zip(contexts, tokens, likelihoods, strict=True):
            progress = self._progress[context.row]
            progress.drafted, progress.start = tuple(ids), len(context.tokens)
            progress.num_computed = len(context.tokens) + len(ids) - 1
            drafts.append(Draft(tuple(ids), tuple(chances), self.name))
        return drafts

    def _forward(self, rows: IntArray, starts: IntArray, counts: IntArray, ids: IntArray) -> Tensor:
        """One pass over so many tokens of rows, `ids` one row's after another's.

        Returns:
            The logits behind each row's last token, `[rows, vocab]`.
        """
        last = np.cumsum(counts) - 1
        if counts.max() <= _FEW_TOKENS:
            row_of_token, starts = flatten_rows(starts, counts)
            rows, counts = rows[row_of_token], np.ones_like(starts)
        order, num_decodes = order_rows(starts, counts)
        first = np.cumsum(counts) - counts
        # Where each token of the batch comes from, and where in the batch each row's last is.
        _, source = flatten_rows(first[order], counts[order])
        place = np.empty_like(source)
        place[source] = np.arange(source.size)
        width = -(-int((starts + counts).max()) // self.cache.block_size)
        batch = Rows(
            starts[order], counts[order], self._table.blocks[rows[order], :width], num_decodes
        )
        # A token that the draft model does not have is some other to it.
        known = np.minimum(ids[source], self.model.vocab_size - 1)
        inputs = self._builder.build(batch, known, place[last])
        return model_forward(self.model.module, inputs, self.cache)

    def _choose(self, logits: Tensor, rows: IntArray, place: int) -> tuple[IntArray, list[float]]:
        """The tokens that come `place` tokens behind the known ones, and how likely each is.

        As the target chooses them, but for its grammars.

        Raises:
            ModelError: The model's output is broken.
        """
        missing = self._vocab_size - logits.shape[1]
        if missing:  # less than none are cut off
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        places = Places(rows, np.full_like(rows, place))
        kernels = self._fast is not None
        tokens, logprobs, _ = choose_tokens(logits, self._table, places, raw=False, kernels=kernels)
        return tokens.cpu().numpy(), logprobs.exp().tolist()
