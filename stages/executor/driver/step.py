"""One step: the rows of a plan, computed, and a token sampled behind each that is known to its end.

A row whose sequence has drafted tokens is computed as several rows of one token each, which have
their sequence's blocks in common. A token is sampled behind each of them, and those count that
would have been sampled without drafts (`speculation.verify`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....bus.messages import (
    PromptLogprobs,
    StartedSequence,
    StepPlan,
    TopLogprobs,
    VerifiedDraft,
)
from ..runner.interface import (
    AdapterTable,
    DecodeGraphs,
    DecodeStep,
    InputBuilder,
    IntArray,
    KVCache,
    LoadedModel,
    Rows,
    StepInputs,
    Uploader,
    flatten_rows,
    model_forward,
    order_rows,
)
from .choose import choose_tokens, packed_sampling
from .constraints import Constraints, PendingMasks
from .feed import TokenFeed
from .pooling import Pooled, PromptPooler
from .report import score_prompts
from .sampling import sample_plain
from .sequences import BoolArray, Places, SequenceTable
from .speculation.drafts import Draft
from .speculation.speculator import Speculator, StepDrafts, accepted_counts, longest_drafts
from .speculation.verify import accept
from .unread import SampledRows, UnreadTokens


class StepOutputs(NamedTuple):
    """What a step gives, most of it still on its way from the device.

    Attributes:
        sampled: The tokens; None where no row samples.
        prompts: As in StepResult.
        pooled: Vectors of prompts.
        verified: As StepResult's `drafts`.
        proposed: By the row of the SequenceTable, all drafts that there were for the step.
        draft_rest: As in StepResult.
    """

    sampled: SampledRows | None = None
    prompts: tuple[PromptLogprobs, ...] = ()
    pooled: Pooled = ()
    verified: tuple[VerifiedDraft, ...] = ()
    proposed: Mapping[int, Draft] = {}
    draft_rest: int = 0


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is on its way; `ExecutorCore.finish` makes its result."""

    plan: StepPlan
    started: tuple[StartedSequence, ...]
    weight_version: int
    start_ns: int
    outputs: StepOutputs

    def wait(self) -> None:
        """Blocks until the device is done. The one method that another thread may call."""
        if self.outputs.sampled is not None:
            self.outputs.sampled.readback.wait()


class _Pass(NamedTuple):
    """The rows of a forward pass, `[rows]` each.

    Attributes:
        rows: Of the table; one comes once more for each of its drafted tokens.
        ahead: How many drafted tokens come before the row's first one.
        starts: Positions of the rows' first tokens.
        num_tokens: How many they compute.
    """

    rows: IntArray
    ahead: IntArray
    starts: IntArray
    num_tokens: IntArray


@dataclass(slots=True, eq=False)
class StepRunner:
    """Runs steps.

    Attributes:
        model: What to run.
        cache: Its KV cache.
        table: The sequences.
        builder: Makes passes of rows.
        upload: Brings numbers to the device.
        adapters: Those that sequences may have.
        pooler: Makes vectors of prompts.
        constraints: The grammars of samples.
        feed: Sampled tokens, on the device.
        unread: Sampled tokens, on their way to the host.
        speculator: Where drafts come from; None for none.
        raw_logprobs: Whether logprobs are of the model's own output.
        kernels: Whether the modules run with our kernels on CPU.
        runs_ahead: As `ExecutorCore.runs_ahead`.
    """

    model: LoadedModel
    cache: KVCache
    table: SequenceTable
    builder: InputBuilder
    upload: Uploader
    adapters: AdapterTable
    pooler: PromptPooler
    constraints: Constraints
    feed: TokenFeed
    unread: UnreadTokens
    speculator: Speculator | None
    raw_logprobs: bool
    kernels: bool
    runs_ahead: bool

    @torch.inference_mode()
    def run(
        self,
        rows: IntArray,
        num_tokens: IntArray,
        num_drafts: IntArray | None,
        graphs: DecodeGraphs | None,
    ) -> StepOutputs:
        """Runs one step.

        Args:
            rows: `[rows]`, of the table, at least one.
            num_tokens: `[rows]`, how many tokens each computes; 0 for a shared prefill.
            num_drafts: `[rows]`, how many drafted ones may be verified besides; None for none.
            graphs: Recorded steps; None when there are none.

        Raises:
            ValueError: A row computes a token that is not known or has no block, or none at all
                where it can't sample with the row before.
            ModelError: The model's output is broken.
        """
        table = self.table
        if num_drafts is not None or (table.adjusted[rows] | table.constrained[rows]).any():
            # Penalties, masks and drafts depend on all tokens before the one to be sampled.
            self.unread.write()
        ends = self._ends(rows, num_tokens)
        if self.model.is_encoder:
            pooled = self.pooler.encode(rows, num_tokens)
            table.num_computed[rows] = ends
            return StepOutputs(pooled=pooled)
        samples = (ends == table.num_known[rows]) & ~table.pools[rows]
        step = _Pass(rows, np.zeros_like(rows), table.num_computed[rows], num_tokens)
        drafts: StepDrafts | None = None
        if num_drafts is not None and self.speculator is not None:
            limits = longest_drafts(table, rows, num_drafts, self.cache.block_size)
            limits[~samples | (num_tokens != 1)] = 0
            drafts = self.speculator.begin(rows, num_tokens, limits)
            step, samples = _with_drafts(step, drafts), np.repeat(samples, drafts.counts + 1)
        places = Places(step.rows[samples], step.ahead[samples])
        masks = self.constraints.begin(places)
        logits_of: IntArray | None = None
        if not num_tokens.all():
            step, samples, logits_of = _computing_rows(step, samples)
        num_scored = table.num_to_score(step.rows, step.num_tokens)
        # A graph has the model's own layers alone, and a token for each sequence.
        plain = samples.all() and not num_scored.any() and (table.adapter[rows] < 0).all()
        if graphs and plain and len(step.rows) == len(rows) and graphs.fits(num_tokens):
            return StepOutputs(self._replay(graphs, rows, masks))
        logits, outputs = self._forward(step, samples, num_scored)
        if logits_of is not None:
            logits = logits[self.upload(logits_of)[0]]
        table.num_computed[rows] = ends
        if not len(places):
            return outputs
        if drafts is not None:
            outputs = outputs._replace(proposed=drafts.proposed, draft_rest=drafts.rest)
        if drafts is None or not drafts.verified:
            return outputs._replace(sampled=self._sample(logits, places, masks))
        sampled, verified = self._verify(logits, places, masks, drafts)
        return outputs._replace(sampled=sampled, verified=verified)

    def _ends(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """How many tokens each row will have computed.

        Raises:
            ValueError: As `run`.
        """
        table = self.table
        ends: IntArray = table.num_computed[rows] + num_tokens
        room = table.num_blocks[rows] * self.cache.block_size
        bad = (num_tokens < 0) | (ends > table.num_known[rows]) | (ends > room)
        if not num_tokens.all():
            bad |= (num_tokens == 0) & ~self._may_fork(rows, num_tokens, ends)
        if bad.any():
            table.complain(int(rows[bad][0]), int(num_tokens[bad][0]))
        return ends

    def _may_fork(self, rows: IntArray, num_tokens: IntArray, ends: IntArray) -> BoolArray:
        """Which rows can sample with the last one before that has tokens, since it has as many and
        the same adapter, and samples itself."""
        table, leaders = self.table, _leaders(num_tokens)
        known, adapters, pools = table.num_known[rows], table.adapter[rows], table.pools[rows]
        same = (known == known[leaders]) & (adapters == adapters[leaders])
        samples = (ends == known) & ~pools
        may: BoolArray = same & samples & (samples & (num_tokens > 0))[leaders]
        return may

    def _forward(
        self, step: _Pass, samples: BoolArray, num_scored: IntArray
    ) -> tuple[Tensor, StepOutputs]:
        """The logits of rows that sample, and what is found out about prompts."""
        table, rows = self.table, step.rows
        inputs, last_token = self._inputs(step, samples, num_scored)
        with self.pooler.watching(rows) as hidden, self.adapters.applied(inputs.adapters):
            logits = model_forward(self.model.module, inputs, self.cache)
        num_samples = int(samples.sum())
        prompts = score_prompts(
            logits[num_samples:],
            table,
            rows,
            num_scored,
            raw=self.raw_logprobs,
            kernels=self.kernels,
        )
        versions = self.adapters.versions(table.adapter[rows]) if hidden else ()
        pooled = self.pooler.take(hidden, rows, last_token, step.num_tokens, versions)
        return logits[:num_samples], StepOutputs(prompts=prompts, pooled=pooled)

    def _inputs(
        self, step: _Pass, samples: BoolArray, num_scored: IntArray
    ) -> tuple[StepInputs, IntArray]:
        """A pass whose logits are those of rows that sample, then those of prompts to score; and
        where in it the last token of each row is."""
        table = self.table
        order, num_decodes = order_rows(step.starts, step.num_tokens)
        rows, starts, counts = step.rows[order], step.starts[order], step.num_tokens[order]
        width = -(-int((starts + counts).max()) // self.cache.block_size)
        # Logits come back in the plan's order, not in that of the batch.
        last_token = np.empty_like(order)
        last_token[order] = np.cumsum(counts) - 1
        logits_index = last_token[samples]
        if num_scored.any():
            first_token = last_token - step.num_tokens + 1
            _, scored = flatten_rows(first_token, num_scored)
            logits_index = np.concatenate((logits_index, scored))
        # All of a decode step are. A vector may be made of any of a prompt's tokens.
        all_read = num_decodes == len(rows) or table.pools[rows].any()
        read = None if all_read else np.unique(logits_index)
        batch_rows = Rows(starts, counts, table.blocks[rows, :width], num_decodes, read)
        row_of_token, positions = batch_rows.flat
        input_ids = table.tokens[rows[row_of_token], positions]
        inputs = self.builder.build(batch_rows, input_ids, logits_index)
        if (input_ids < 0).any():
            inputs = replace(inputs, input_ids=self.feed.resolve(inputs.input_ids))
        if (table.adapter[rows] >= 0).any():
            inputs = replace(inputs, adapters=self.adapters.step(table.adapter[rows][row_of_token]))
        return inputs, last_token

    def _replay(
        self, graphs: DecodeGraphs, rows: IntArray, masks: PendingMasks | None
    ) -> SampledRows:
        """A step in which every row computes its last token and samples the next."""
        table = self.table
        positions = table.num_computed[rows]
        width = int(positions.max()) // self.cache.block_size + 1
        step = DecodeStep(
            input_ids=table.tokens[rows, positions],
            positions=positions,
            tables=table.blocks[rows, :width],
            table_rows=rows,
            sampling=packed_sampling(table, rows),
        )
        logits, tokens, logprobs = graphs.run(step)
        table.num_computed[rows] += 1
        places = Places.next_of(rows)
        if not self._all_plain(rows):
            return self._sample(logits, places, masks)
        return self.unread.add(places, tokens, logprobs, (), fed=True)

    def _sample(self, logits: Tensor, places: Places, masks: PendingMasks | None) -> SampledRows:
        """Chooses a token for each place, none of which is behind drafted tokens."""
        rows = places.rows
        tops: tuple[TopLogprobs, ...] = ()
        if self.runs_ahead and self._all_plain(rows):
            packed = self.upload(*packed_sampling(self.table, rows))
            temperatures, numbers = (part.view(torch.float64) for part in packed)
            tokens, logprobs = sample_plain(logits, temperatures, numbers)
        else:
            tokens, logprobs, tops = self._choose(logits, places, masks)
        return self._count(places, tokens, logprobs, tops)

    def _verify(
        self, logits: Tensor, places: Places, masks: PendingMasks | None, drafts: StepDrafts
    ) -> tuple[SampledRows, tuple[VerifiedDraft, ...]]:
        """Chooses a token for each place; those count that would have come without drafts.

        It waits for the tokens: how far the sequences have come has to be known before the next
        step can begin.
        """
        assert self.speculator is not None
        tokens, logprobs, tops = self._choose(logits, places, masks)
        unsure = None
        if masks is not None:
            found = masks.result()
            unsure = np.zeros(len(places), np.bool_)
            unsure[found.places] = found.unsure
        counts = accept(self.table, places, tokens.cpu().numpy(), unsure)
        firsts = np.flatnonzero(places.ahead == 0)
        rows, accepted = places.rows[firsts], accepted_counts(counts, firsts)
        verified = self.speculator.verdicts(drafts, rows, accepted)
        self.table.num_computed[rows] += accepted
        kept = torch.from_numpy(np.flatnonzero(counts)).to(tokens.device)
        if tops:
            tops = tuple(compress(tops, counts))
        return self._count(places[counts], tokens[kept], logprobs[kept], tops), verified

    def _choose(
        self, logits: Tensor, places: Places, masks: PendingMasks | None
    ) -> tuple[Tensor, Tensor, tuple[TopLogprobs, ...]]:
        return choose_tokens(
            logits,
            self.table,
            places,
            raw=self.raw_logprobs,
            kernels=self.kernels,
            masks=masks,
        )

    def _count(
        self, places: Places, tokens: Tensor, logprobs: Tensor, tops: tuple[TopLogprobs, ...]
    ) -> SampledRows:
        """The sequences have got these tokens."""
        if self.runs_ahead:
            # Of several tokens of a row the last one is fed.
            last = np.append(places.ahead[1:] == 0, True)
            fed = tokens if last.all() else tokens[torch.from_numpy(last).to(tokens.device)]
            self.feed.put(self.upload(places.rows[last])[0], fed)
        versions = self.adapters.versions(self.table.adapter[places.rows])
        return self.unread.add(
            places, tokens, logprobs, tops, fed=self.runs_ahead, adapter_versions=versions
        )

    def _all_plain(self, rows: IntArray) -> bool:
        """Whether `sample_plain` can choose the tokens, which waits for nothing."""
        return not self.raw_logprobs and bool(self.table.plain[rows].all())


def _leaders(num_tokens: IntArray) -> IntArray:
    """For each row the last one, up to it, that has tokens; the first row where none has."""
    computing = np.where(num_tokens > 0, np.arange(len(num_tokens)), 0)
    leaders: IntArray = np.maximum.accumulate(computing)
    return leaders


def _computing_rows(step: _Pass, samples: BoolArray) -> tuple[_Pass, BoolArray, IntArray]:
    """Return the rows that have tokens, and whether they sample; and for each row that samples,
    shared prefills included, the index of its logits."""
    computes = step.num_tokens > 0
    logits_of: IntArray = np.cumsum(samples & computes)[samples] - 1
    return _Pass(*(part[computes] for part in step)), samples[computes], logits_of


def _with_drafts(step: _Pass, drafts: StepDrafts) -> _Pass:
    """A row of its own for each drafted token, behind the row of its sequence."""
    row, ahead = flatten_rows(np.zeros_like(step.rows), drafts.counts + 1)
    return _Pass(step.rows[row], ahead, step.starts[row] + ahead, step.num_tokens[row])
