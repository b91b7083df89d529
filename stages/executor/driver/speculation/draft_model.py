"""A draft model: a smaller model of the same vocabulary that runs ahead of the target.

It samples with the random numbers that the target will use at these positions, under the same
temperature and limits. Where the two distributions agree the tokens agree, also at temperature 1.

Its KV cache uses the block numbers of the target's block tables, so batching's decisions hold for
both. A sequence starts with nothing computed and writes what it computes, also into shared blocks:
sequences that share a block have the same tokens there. It reads only positions that it has
written, or found written for the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    IntArray,
    LoadedModel,
    Rows,
    StepInputs,
    flatten_rows,
    load_model,
    make_runner,
    order_rows,
    with_kv_dtype,
)
from ..choose import TokenChooser
from ..sequences import Places, SequenceTable
from .drafts import NO_DRAFT, Draft, DraftContext, DraftSource

_FIRST_LENGTH = 4
"""Length of a sequence's first draft."""

_UNSURE = 0.3
"""A greedy draft ends with a token less likely than this."""

_MOST_SKIPPED = 64
"""The most steps without a draft after wrong ones."""

_FEW_TOKENS = 8
"""Rows of at most so many tokens run as rows of one token, for the kernels."""

_SAME_SHARE = 0.99
"""The share of the target's tokens that must have the same id in the draft model's tokenizer."""


def load_draft_model(config: EngineConfig, target: LoadedModel) -> LoadedModel:
    """Load the model of `engine.draft_model_path`, before the KV cache is sized.

    Raises:
        ModelError: It can't be loaded, or can't draft for the target.
    """
    if not target.generates:
        raise ModelError(
            "the model makes embeddings and generates no tokens to draft; set "
            "draft_model_path to ''"
        )
    try:
        model = with_kv_dtype(config, load_model(draft_config(config)))
    except ModelError as error:
        raise ModelError(f"the draft model: {error.message}") from error
    if not model.generates:
        raise ModelError(
            "the draft model makes embeddings and generates nothing; set draft_model_path to one "
            "that generates"
        )
    if model.mixers is not None:
        raise ModelError(
            "the draft model has recurrent state, which no draft can be taken back from; set "
            "draft_model_path to a model whose layers are all attention"
        )
    _check_vocabulary(config, model, target)
    return model


def draft_config(config: EngineConfig) -> EngineConfig:
    """Return the draft model's settings: the target's, without deterministic mode, and without the
    names of its modules."""
    return msgspec.structs.replace(
        config.on_one_rank(),
        model_path=config.draft_model_path,
        draft_model_path="",
        quantization_ignore=(),
        deterministic=False,
        attention="auto",
        attention_tile=0,
    )


def _check_vocabulary(config: EngineConfig, model: LoadedModel, target: LoadedModel) -> None:
    """Raises ModelError if the two models have different vocabularies."""
    own, wanted = (_token_ids(each.model_folder) for each in (draft_config(config), config))
    if own and wanted:
        # Models of one family differ in a few special tokens, and in padding.
        same = sum(own.get(token) == token_id for token, token_id in wanted.items())
        if same >= _SAME_SHARE * len(wanted):
            return
        difference = f"{same} of the {len(wanted)} tokens have the same id"
    elif model.vocab_size == target.vocab_size:
        return
    else:
        difference = f"it has {model.vocab_size} tokens and the model has {target.vocab_size}"
    raise ModelError(
        f"the draft model has another vocabulary: {difference}; set draft_model_path to one "
        "with the same tokenizer"
    )


def _token_ids(folder: Path) -> dict[str, int]:
    tokenizer = find_tokenizer(folder)
    return {} if tokenizer is None else tokenizer.get_vocab()


@dataclass(slots=True)
class _Progress:
    """The draft model's state of one sequence.

    Attributes:
        seq_id: The sequence.
        num_computed: Leading tokens whose KV is in the draft model's cache.
        hashes: Of the tokens up to the end of each computed block.
        drafted: Its last draft.
        start: Position of that draft in the sequence.
        length: Length of the next draft.
        misses: Useless drafts in a row.
        skips: Steps to skip.
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
        """Compare the last draft with the sequence, and drop the KV of wrong tokens."""
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
            # Wrong, or not verified since other work paid more: likely again at the next place.
            self.misses += 1
            self.skips = min(2**self.misses - 2, _MOST_SKIPPED)
        self.drafted = ()


class DraftModel(DraftSource):
    """A DraftSource whose methods run on the target's thread, between its passes.

    Updates of weights don't change it.

    Attributes:
        cache: Its KV cache; call `forget_kv` when the contents are lost.
    """

    name: ClassVar[str] = "model"

    _keeps_drafted: ClassVar[bool] = True
    """Whether the KV of drafted tokens holds for the sequence, where they were right."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        table: SequenceTable,
        num_blocks: int,
        vocab_size: int,
    ) -> None:
        """Allocate the cache.

        Args:
            config: The target's settings.
            model: From `load_draft_model`.
            table: The target's sequences.
            num_blocks: Of the target's cache.
            vocab_size: The target's.
        """
        self._runner = make_runner(draft_config(config), model, num_blocks)
        self.cache = self._runner.cache
        self._table = table
        self._chooser = TokenChooser(table, raw=False, kernels=self._runner.kernels, reports=False)
        self._most_tokens = config.max_tokens_per_batch
        self._vocab_size, self._known_ids = vocab_size, model.vocab_size
        self._progress: dict[int, _Progress] = {}
        # By block: the hash of the tokens up to its end whose KV it holds; 0 for none.
        self._filled: IntArray = np.zeros(num_blocks, np.int64)
        self._broken = False
        self._failure = ""

    @torch.inference_mode()
    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """As `DraftSource.propose`.

        New tokens of a sequence are computed first, at most a batch's tokens per step; until then
        the sequence has no draft.
        """
        drafts = [NO_DRAFT] * len(contexts)
        if self._broken:
            return drafts
        lengths = [self._length(context) for context in contexts]
        wanted = [i for i, length in enumerate(lengths) if length > 0]
        if not wanted:
            return drafts
        try:
            # The target's torch function mode doesn't apply here.
            with torch._C.DisableTorchFunction(), self._runner.active():
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
        """As `DraftSource.forget`; its filled blocks can be found again."""
        if (progress := self._progress.get(row)) is not None and progress.seq_id == seq_id:
            del self._progress[row]

    def clear(self) -> None:
        """As `DraftSource.clear`."""
        self._progress.clear()
        self._broken = False

    def forget_kv(self) -> None:
        """The contents of the cache are lost."""
        self._progress.clear()
        self._filled[:] = 0

    def take_failure(self) -> str:
        """Return why drafting stopped, once; "" otherwise."""
        failure, self._failure = self._failure, ""
        return failure

    def close(self) -> None:
        """Free weights and KV; the object is unusable then."""
        self._runner.close()
        del self._runner, self.cache

    # --- inside -------------------------------------------------------------------------------

    def _give_up(self, error: Exception) -> None:
        """Stop drafting. A lost device shows here, or in the target's pass."""
        self._broken = True
        self._failure = error.message if isinstance(error, ModelError) else repr(error)
        self.forget_kv()
        # NaN would spoil the next sequence in a block.
        self.cache.clear()

    def _length(self, context: DraftContext) -> int:
        """Return the tokens to draft; 0 without room, or while the sequence is skipped."""
        progress = self._progress.get(context.row)
        if progress is None or progress.seq_id != context.seq_id:
            progress = self._progress[context.row] = self._begin(context)
        progress.settle(context.tokens)
        if progress.skips:
            progress.skips -= 1
            return 0
        # The last token's KV is not needed.
        blocks = int(self._table.num_blocks[context.row]) * self.cache.block_size
        room = min(blocks, self._runner.model.max_model_len) - len(context.tokens) + 1
        return min(progress.length, context.limit, room)

    def _begin(self, context: DraftContext) -> _Progress:
        """Start a sequence behind the blocks that hold its tokens already."""
        progress = _Progress(context.seq_id)
        size = self.cache.block_size
        # The last token is always computed.
        whole = (len(context.tokens) - 1) // size
        self._hash(progress, context, whole)
        blocks = self._table.blocks[context.row, :whole]
        same = self._filled[blocks] == np.array(progress.hashes, np.int64)
        found = whole if same.all() else int(same.argmin())
        del progress.hashes[found:]
        progress.num_computed = found * size
        return progress

    def _hash(self, progress: _Progress, context: DraftContext, num_blocks: int) -> None:
        """Extend `hashes` to so many blocks."""
        hashes, size = progress.hashes, self.cache.block_size
        before = hashes[-1] if hashes else hash(context.scope)
        for block in range(len(hashes), num_blocks):
            part = context.tokens[block * size : (block + 1) * size]
            before = hash((before, part.tobytes()))
            hashes.append(before)

    def _note(self, context: DraftContext, stop: int) -> None:
        """Update `_filled` before tokens up to `stop` are computed."""
        progress, size = self._progress[context.row], self.cache.block_size
        blocks = self._table.blocks[context.row]
        done, before = progress.num_computed // size, len(progress.hashes)
        self._hash(progress, context, done)
        self._filled[blocks[before:done]] = progress.hashes[before:done]
        self._filled[blocks[done : -(-stop // size)]] = 0

    def _catch_up(self, contexts: Sequence[DraftContext]) -> tuple[list[int], Tensor | None]:
        """Compute new tokens.

        Returns:
            The contexts that are complete, and their logits, `[ready, vocab]`; None for none.
        """
        pending = []
        for context in contexts:
            progress = self._progress[context.row]
            progress.num_computed = min(progress.num_computed, len(context.tokens) - 1)
            pending.append(len(context.tokens) - progress.num_computed)
        left = self._most_tokens
        taken: dict[int, int] = {}
        # The shortest first, so that a long prompt delays no other sequence.
        for i in sorted(range(len(contexts)), key=pending.__getitem__):
            if count := min(pending[i], left):
                taken[i] = count
                left -= count
        chosen = [contexts[i] for i in taken]
        counts = np.array(list(taken.values()), np.int64)
        starts = np.array([self._progress[c.row].num_computed for c in chosen], np.int64)
        for context, stop in zip(chosen, (starts + counts).tolist(), strict=True):
            self._note(context, stop)
            self._progress[context.row].num_computed = stop
        ids = [
            context.tokens[start : start + count]
            for context, start, count in zip(chosen, starts, counts, strict=True)
        ]
        rows = np.array([context.row for context in chosen], np.int64)
        logits = self._forward(rows, starts, counts, np.concatenate(ids))
        ready = [place for place, i in enumerate(taken) if taken[i] == pending[i]]
        whole = [i for i in taken if taken[i] == pending[i]]
        return whole, logits[ready] if ready else None

    def _write_on(
        self, contexts: Sequence[DraftContext], lengths: Sequence[int], logits: Tensor | None
    ) -> list[Draft]:
        """Draft for complete sequences, from the logits behind their known tokens."""
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
            table.write_tokens(rows[running], table.num_known[rows[running]] + place, sampled)
            running, sampled = running[goes_on], sampled[goes_on]
            if not running.size:
                break
            starts = known[running] + place
            logits = self._forward(rows[running], starts, np.ones_like(starts), sampled)
        drafts = []
        for context, ids, chances in zip(contexts, tokens, likelihoods, strict=True):
            progress = self._progress[context.row]
            progress.drafted, progress.start = tuple(ids), len(context.tokens)
            progress.num_computed = len(context.tokens) + (len(ids) - 1) * self._keeps_drafted
            drafts.append(Draft(tuple(ids), tuple(chances), self.name))
        return drafts

    def _forward(self, rows: IntArray, starts: IntArray, counts: IntArray, ids: IntArray) -> Tensor:
        """Run one pass over `counts` tokens of each row; `ids` row by row.

        Returns:
            The logits behind each row's last token, `[rows, vocab]`.
        """
        last, ends = np.cumsum(counts) - 1, (rows, starts + counts)
        if counts.max() <= _FEW_TOKENS:
            row_of_token, starts = flatten_rows(starts, counts)
            rows, counts = rows[row_of_token], np.ones_like(starts)
        order, num_decodes = order_rows(starts, counts)
        first = np.cumsum(counts) - counts
        # The origin of each token of the batch, and each row's last token in it.
        _, source = flatten_rows(first[order], counts[order])
        place = np.empty_like(source)
        place[source] = np.arange(source.size)
        width = -(-int((starts + counts).max()) // self.cache.block_size)
        batch = Rows(
            starts[order], counts[order], self._table.blocks[rows[order], :width], num_decodes
        )
        # Tokens beyond the draft model's vocabulary are replaced by its last one.
        known = np.minimum(ids[source], self._known_ids - 1)
        return self._pass(self._runner.builder.build(batch, known, place[last]), batch, *ends)

    def _pass(self, inputs: StepInputs, batch: Rows, rows: IntArray, ends: IntArray) -> Tensor:
        """Return the logits of a pass; `rows` and `ends`: the rows that were wanted, and the
        number of tokens of each up to the last one."""
        return self._runner.forward(inputs)

    def _choose(self, logits: Tensor, rows: IntArray, place: int) -> tuple[IntArray, list[float]]:
        """Choose tokens `place` positions behind the known ones, and return their probabilities.

        As the target chooses them, without its grammars.

        Raises:
            ModelError: The model's output is broken.
        """
        missing = self._vocab_size - logits.shape[1]
        if missing:  # less than none are cut off
            logits = F.pad(logits, (0, missing), value=float("-inf"))
        places = Places(rows, np.full_like(rows, place))
        tokens, logprobs, *_ = self._chooser.choose(logits, places)
        return tokens.cpu().numpy(), logprobs.exp().tolist()
