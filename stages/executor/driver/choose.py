"""Token choice: from the model's logits, adjusted and masked for each request, to tokens.

The order is that of docs/sampling.md: repetition, presence, frequency, bias, stop tokens, grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....bus.messages import TopLogprobs
from ....bus.parts.columns import (
    NO_COLUMNS,
    SAMPLING_MASKS,
    SUPPORT_LOGPROBS,
    Columns,
    columns_of,
)
from ....config import EngineConfig
from ..runner.interface import IntArray, Uploader
from .logprobs import gather_logprobs, report_top_logprobs
from .sampling import NO_LIMITS, Limits, sample_plain, sample_rows, sample_within, uniforms
from .sequences import BoolArray, Places, SequenceTable

if TYPE_CHECKING:
    from .grammar_masks import PendingMasks


class ChosenTokens(NamedTuple):
    """Tokens for some places.

    Attributes:
        tokens, logprobs: `[batch]` each, on the device.
        top_logprobs: `report_top_logprobs`.
        columns: As in `Sampled`.
        shares: Support logprobs, `[batch]`, on the device; None if they are in `columns`, or none.
    """

    tokens: Tensor
    logprobs: Tensor
    top_logprobs: tuple[TopLogprobs, ...] = ()
    columns: Columns = NO_COLUMNS
    shares: Tensor | None = None

    def with_columns(self, columns: Columns) -> ChosenTokens:
        """Return the tokens with further columns, `[batch]` each."""
        return self._replace(columns={**self.columns, **columns}) if columns else self

    def of(self, kept: BoolArray) -> ChosenTokens:
        """Return the tokens of some places, `[batch]`."""
        indices = torch.from_numpy(np.flatnonzero(kept)).to(self.tokens.device)
        return ChosenTokens(
            self.tokens[indices],
            self.logprobs[indices],
            tuple(compress(self.top_logprobs, kept)),
            columns_of(self.columns, kept),
        )


class TokenChooser(NamedTuple):
    """Chooses tokens, and reports logprobs.

    Attributes:
        table: The sequences.
        raw: Whether logprobs are of the model's own output.
        kernels: As in `scale_logits`.
        most_in_mask: Most ids in a sampling mask.
        reports: Whether anything is reported beside tokens and logprobs.
    """

    table: SequenceTable
    raw: bool
    kernels: bool
    most_in_mask: int = 0
    reports: bool = True

    @classmethod
    def of(cls, table: SequenceTable, config: EngineConfig, *, kernels: bool) -> TokenChooser:
        """Return the chooser of the settings."""
        return cls(table, config.logprobs_mode == "raw", kernels, config.max_sampling_mask)

    def choose(
        self, model_logits: Tensor, places: Places, masks: PendingMasks | None = None
    ) -> ChosenTokens:
        """Choose a token for each place, and report it in the configured mode.

        Args:
            model_logits: `[batch, vocab]` float32; changed unless `raw`.
            places: `[batch]`, of the rows of logits.
            masks: From `Constraints.begin`, for these places.

        Raises:
            ModelError: The model's output is broken.
        """
        table, kernels = self.table, self.kernels
        upload = partial(_upload, beside=model_logits)
        rows = places.rows
        logits = adjust_logits(model_logits, table, places)
        if masks is not None:
            if self.raw and logits is model_logits:
                logits = logits.clone()
            masks.result().apply(logits, kernels=kernels)
        temperature = table.temperature[rows]
        temperatures = upload(temperature)
        numbers = None
        if temperature.any():
            numbers = upload(uniforms(table.seed[rows], table.num_generated[rows] + places.ahead))
        if not table.restricted[rows].any():
            choice = sample_rows(logits, temperatures, numbers, NO_LIMITS, kernels=kernels)
            tokens, logprobs, columns = choice.tokens, choice.logprobs, NO_COLUMNS
        else:
            tokens, logprobs, columns = self._restricted(logits, places, temperatures, numbers)
        if self.raw:
            logits, temperatures = model_logits, torch.ones_like(temperatures)
            logprobs = gather_logprobs(logits, temperatures, tokens[:, None], kernels=kernels)[:, 0]
        if not self.reports:
            return ChosenTokens(tokens, logprobs)
        counts = table.num_logprobs[rows]
        tops = report_top_logprobs(logits, temperatures, counts, kernels=kernels)
        return ChosenTokens(tokens, logprobs, tops, columns)

    def never_waits(self, rows: IntArray) -> tuple[bool, bool]:
        """Return whether tokens of rows can be chosen without waiting for the device, and whether
        they have no limits either."""
        simple = not self.raw and bool(self.table.simple[rows].all())
        return simple, simple and bool(self.table.plain[rows].all())

    def choose_ahead(self, logits: Tensor, rows: IntArray, upload: Uploader) -> ChosenTokens | None:
        """Choose the next token of each row without waiting for the device; None if it takes
        more."""
        simple, plain = self.never_waits(rows)
        if not simple:
            return None
        packed = upload(*packed_sampling(self.table, rows))
        temperatures, numbers, *limits = (part.view(torch.float64) for part in packed)
        if plain:
            return ChosenTokens(*sample_plain(logits, temperatures, numbers))
        tokens, logprobs, shares = sample_within(logits, temperatures, numbers, Limits(*limits))
        return ChosenTokens(tokens, logprobs, shares=shares)

    def _restricted(
        self, logits: Tensor, places: Places, temperatures: Tensor, numbers: Tensor | None
    ) -> tuple[Tensor, Tensor, Columns]:
        """Choose tokens where some rows have limits, masks to report, or forced tokens."""
        table, kernels, rows = self.table, self.kernels, places.rows
        upload = partial(_upload, beside=logits)
        limited, masked = table.limited[rows], table.masks[rows]
        top_k, top_p, min_p = table.top_k[rows], table.top_p[rows], table.min_p[rows]
        limits = Limits(
            upload(top_k) if top_k.any() else None,
            upload(top_p) if (top_p < 1).any() else None,
            upload(min_p) if min_p.any() else None,
        )
        keeps = self.reports and bool(masked.any())
        choice = sample_rows(
            logits, temperatures, numbers, limits, kernels=kernels, keep_weights=keeps
        )
        tokens, logprobs = choice.tokens, choice.logprobs
        which, ids = map(upload, table.forced_at(places))
        if len(which):
            tokens = tokens.index_copy(0, which, ids)
            scaled = logits[which], temperatures[which], ids[:, None]
            given = gather_logprobs(*scaled, kernels=kernels)
            logprobs = logprobs.index_copy(0, which, given[:, 0])
        columns: dict[str, tuple[Any, ...]] = {}
        if choice.support_logprobs is not None:
            values = zip(limited.tolist(), choice.support_logprobs.tolist(), strict=True)
            columns[SUPPORT_LOGPROBS] = tuple([value if has else None for has, value in values])
        if keeps:
            from .support import sampling_masks

            own = choice, masked, table.temperature[rows] == 0
            columns[SAMPLING_MASKS] = sampling_masks(*own, self.most_in_mask)
        return tokens, logprobs, columns


def packed_sampling(table: SequenceTable, rows: IntArray) -> tuple[IntArray, ...]:
    """Return temperatures, uniform numbers and the three limits of rows, `[batch]` each: float64
    viewed as int64, to travel with other integers."""
    numbers = uniforms(table.seed[rows], table.num_generated[rows])
    limits = table.top_k[rows], table.top_p[rows], table.min_p[rows]
    floats = table.temperature[rows], numbers, *limits
    return tuple(np.asarray(each, np.float64).view(np.int64) for each in floats)


def adjust_logits(logits: Tensor, table: SequenceTable, places: Places) -> Tensor:
    """Apply penalties, bias and `min_tokens`, before the temperature.

    Other rows keep their bits, and cost nothing if there are only such rows.

    Args:
        logits: `[batch, vocab]` float32; not changed.
        table: The sequences, with all tokens before each place.
        places: `[batch]`, of the rows of logits.
    """

    def adjust(part: Tensor, chosen: Places) -> Tensor:
        part = _repetition(part, table, chosen)
        part = _presence_and_frequency(part, table, chosen)
        part = _bias(part, table, chosen.rows)
        return _on_some(part, chosen, table.must_go_on(chosen), mask)

    def mask(part: Tensor, chosen: Places) -> Tensor:
        stop_ids, _ = _pad([sorted(table.stop_ids[row]) for row in chosen.rows])
        return part.scatter(1, _upload(stop_ids, part), float("-inf"))

    return _on_some(logits, places, table.adjusted[places.rows], adjust)


def _on_some(
    logits: Tensor, places: Places, involved: BoolArray, change: Callable[[Tensor, Places], Tensor]
) -> Tensor:
    """Change the involved rows of logits."""
    if not involved.any():
        return logits
    if involved.all():
        return change(logits, places)
    chosen = _upload(np.flatnonzero(involved), logits)
    return logits.index_copy(0, chosen, change(logits[chosen], places[involved]))


def _repetition(logits: Tensor, table: SequenceTable, places: Places) -> Tensor:
    rows = places.rows
    penalties = table.repetition_penalty[rows]
    used = penalties != 1
    if not used.any():
        return logits
    # A penalty of 1 changes nothing, so one token of such a row is enough.
    stops = np.where(used, table.num_known[rows] + places.ahead, 1)
    token_ids, _ = _tokens_between(table, rows, np.zeros_like(stops), stops)
    return apply_repetition_penalty(logits, _upload(token_ids, logits), _upload(penalties, logits))


def _presence_and_frequency(logits: Tensor, table: SequenceTable, places: Places) -> Tensor:
    rows = places.rows
    presence, frequency = table.presence_penalty[rows], table.frequency_penalty[rows]
    starts = table.num_known[rows] - table.num_generated[rows]
    ends = table.num_known[rows] + places.ahead
    used = (presence != 0) | (frequency != 0)
    if not (used & (starts < ends)).any():
        return logits
    token_ids, valid = _tokens_between(table, rows, starts, np.where(used, ends, starts))
    on_device = _upload(token_ids, logits), _upload(valid, logits)
    if presence.any():
        logits = apply_presence_penalty(logits, *on_device, _upload(presence, logits))
    if frequency.any():
        logits = apply_frequency_penalty(logits, *on_device, _upload(frequency, logits))
    return logits


def _bias(logits: Tensor, table: SequenceTable, rows: IntArray) -> Tensor:
    biases = [table.logit_bias[row] for row in rows]
    if not any(biases):
        return logits
    token_ids, valid = _pad([list(bias) for bias in biases])
    values = np.zeros(token_ids.shape, np.float32)
    values[valid] = [value for bias in biases for value in bias.values()]
    return logits.scatter_add(1, _upload(token_ids, logits), _upload(values, logits))


def _tokens_between(
    table: SequenceTable, rows: IntArray, starts: IntArray, stops: IntArray
) -> tuple[IntArray, BoolArray]:
    """Return the tokens of rows from `starts` to `stops`, `[batch, longest]`, and which are real.

    Padding repeats the row's first; in an empty row it is any token.
    """
    columns = starts[:, None] + np.arange((stops - starts).max())
    valid = columns < stops[:, None]
    last = table.tokens.shape[1] - 1
    columns = np.minimum(np.where(valid, columns, starts[:, None]), last)
    # After a row's tokens there may be a placeholder of an earlier sequence.
    return np.maximum(table.tokens[rows[:, None], columns], 0), valid


def _pad(lists: Sequence[Sequence[int]]) -> tuple[IntArray, BoolArray]:
    """Return token ids as `[batch, longest]`, and which are real; padding is the first, or 0."""
    padded = np.zeros((len(lists), max(map(len, lists))), np.int64)
    valid = np.zeros(padded.shape, np.bool_)
    for row, values in enumerate(lists):
        if values:
            padded[row] = values[0]
            padded[row, : len(values)] = values
            valid[row, : len(values)] = True
    return padded, valid


def _upload(array: npt.NDArray[Any], beside: Tensor) -> Tensor:
    return torch.from_numpy(array).to(beside.device)


def apply_repetition_penalty(logits: Tensor, token_ids: Tensor, penalties: Tensor) -> Tensor:
    """Divide positive logits of these tokens by the penalty and multiply negative ones.

    Keskar et al., "CTRL: a conditional transformer language model", 2019, as Transformers has it.

    Args:
        logits: `[batch, vocab]` float32.
        token_ids: `[batch, k]` int64, padded by repeating any of the row's own.
        penalties: `[batch]`, above 0; 1 changes nothing.
    """
    penalties = penalties[:, None]
    values = logits.gather(1, token_ids)
    return logits.scatter(
        1, token_ids, torch.where(values < 0, values * penalties, values / penalties)
    )


def apply_presence_penalty(
    logits: Tensor, token_ids: Tensor, valid: Tensor, penalties: Tensor
) -> Tensor:
    """Subtract the penalty from the logit of each of these tokens, once.

    Args:
        logits: `[batch, vocab]` float32.
        token_ids: `[batch, k]` int64; padding repeats the row's first.
        valid: `[batch, k]`, false for padding. A row may be all padding.
        penalties: `[batch]`; 0 changes nothing.
    """
    # Padding repeats one of the row's tokens and must write the same value: so the row counts as a
    # whole or, if nothing in it is valid, not at all.
    penalties = torch.where(valid.any(dim=-1), penalties, 0.0)[:, None]
    return logits.scatter(1, token_ids, logits.gather(1, token_ids) - penalties)


def apply_frequency_penalty(
    logits: Tensor, token_ids: Tensor, valid: Tensor, penalties: Tensor
) -> Tensor:
    """Subtract the penalty from the logits of these tokens as often as each occurs.

    Arguments as for `apply_presence_penalty`.
    """
    # Equal summands: the order of additions, which a GPU leaves open, has no effect.
    return logits.scatter_add(1, token_ids, torch.where(valid, -penalties[:, None], 0.0))
