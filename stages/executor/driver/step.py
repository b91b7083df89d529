"""One step: compute the rows of a plan, and sample after each sequence that reaches its end.

A row with drafted tokens becomes several rows of one token that share their sequence's blocks. A
token is sampled after each; tokens that would have been sampled without drafts count
(`speculator.accept`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from ....bus.control import Cancel
from ....bus.parts.columns import NO_COLUMNS, Columns
from ....bus.parts.images import PromptMedia
from ....bus.parts.scoring import PromptScores
from ....bus.parts.speculation import VerifiedDraft
from ....bus.sections import Section
from ....bus.steps import NewSequence, StepPlan
from ....bus.times import StepTimes
from ..runner.interface import (
    IntArray,
    ModelRunner,
    Rows,
    StepInputs,
    StepOutput,
    Uploader,
    flatten_rows,
    order_rows,
)
from .choose import ChosenTokens, TokenChooser, packed_sampling
from .constraints import Constraints
from .sampled import Pooled, SampledRows, TokenFeed, UnreadTokens
from .sequences import BoolArray, Places, SequenceTable

if TYPE_CHECKING:
    from ....bus.parts.experts import PromptExperts
    from ..runner.graphs import DecodeGraphs
    from ..runner.interface import Routers
    from .grammar_masks import PendingMasks
    from .images import SequenceImages
    from .pooling import PromptPooler
    from .speculation.drafts import Draft
    from .speculation.speculator import Speculator, StepDrafts
    from .states import SequenceStates
    from .targets import ScoredPlaces


class StepOutputs(NamedTuple):
    """The outputs of a step, most of them still on the device.

    Attributes:
        sampled: The tokens; None if no row samples.
        prompts: Logprobs at positions of prompts; None without any.
        experts: Routed experts of prompts.
        pooled: Vectors of prompts.
        verified: As StepResult's `drafts`.
        proposed: All drafts for the step, by row of the SequenceTable.
        draft_rest: As in StepResult.
    """

    sampled: SampledRows | None = None
    prompts: PromptScores | None = None
    experts: tuple[PromptExperts, ...] = ()
    pooled: Pooled = ()
    verified: tuple[VerifiedDraft, ...] = ()
    proposed: Mapping[int, Draft] = {}
    draft_rest: int = 0


NO_OUTPUTS = StepOutputs()


class _Pass(NamedTuple):
    """The rows of a forward pass, `[rows]` each.

    Attributes:
        rows: Rows of the table, each repeated for each of its drafted tokens.
        ahead: Drafted tokens before the row's first one.
        starts: Positions of the rows' first tokens.
        num_tokens: Tokens to compute.
    """

    rows: IntArray
    ahead: IntArray
    starts: IntArray
    num_tokens: IntArray


class BegunStep(NamedTuple):
    """A step up to its forward pass, for `StepRunner.end`.

    Attributes:
        output: Output of the pass.
        step: Its rows.
        samples: `[rows]`, which of them sample.
        scored: Positions of prompts whose logits are read; None without any.
        last_token: `[rows]`, the index of each row's last token.
        places: Positions at which tokens are sampled.
        masks: For these places; None if there are none.
        logits_of: The logits of each place; None if they are in its order.
        drafts: The drafted tokens; None if there are none.
    """

    output: StepOutput
    step: _Pass
    samples: BoolArray
    scored: ScoredPlaces | None
    last_token: IntArray
    places: Places
    masks: PendingMasks | None
    logits_of: IntArray | None
    drafts: StepDrafts | None


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step, from its plan to its result.

    Attributes:
        plan: The plan.
        start_ns: When it began on the device.
        num_drafts: `[rows of the plan]`, drafted tokens that each may verify; () for none.
        runs: `[rows of the plan]`, whether their sequences still run; the others are dropped.
        rows: `[rows]`, those that run, of the table.
        num_tokens: `[rows]`, tokens that each computes.
        num_computed: The sum of these; once the step is finished, verified drafts included.
        weight_version: As in StepResult.
        changed_ns, times: When changes were applied, 0 for none; and the times of the plan.
        outputs: Outputs of the rows.
        begun: The step, if its outputs are still to be made, since other ranks compute it.
        computing: Sequences in such steps, as of the core; a `reset` makes a new set.
        failed: As in StepResult; besides requests whose constraints fail.
        parts: Sections of the result.
    """

    plan: StepPlan
    start_ns: int
    num_drafts: tuple[int, ...] = ()
    runs: BoolArray = field(init=False)
    rows: IntArray = field(init=False)
    num_tokens: IntArray = field(init=False)
    num_computed: int = 0
    weight_version: int = 0
    changed_ns: int = 0
    times: StepTimes | None = None
    outputs: StepOutputs = NO_OUTPUTS
    begun: BegunStep | None = None
    computing: set[int] | None = None
    failed: tuple[Cancel, ...] = ()
    parts: list[Section] = field(default_factory=list)

    def wait(self) -> None:
        """Block until the device is done. The only method for other threads."""
        if self.begun is not None:
            self.begun.output.wait()
        elif self.outputs.sampled is not None:
            self.outputs.sampled.readback.wait()


@dataclass(slots=True, eq=False)
class StepRunner:
    """Runs steps.

    Attributes:
        runner: The model.
        table: The sequences.
        upload: Copies arrays to the device.
        constraints: The grammars of samples.
        feed: Sampled tokens on the device.
        unread: Sampled tokens on their way to the host.
        chooser: Chooses tokens.
        runs_ahead: Whether tokens are fed to the next step on the device.
        pooler: Makes vectors of prompts; None if the model makes none.
        speculator: The source of drafts; None if there are none.
        images: Puts in the images of prompts; None if the model takes none.
        graphs: Recorded decode steps; None if there are none.
        states: The recurrent states of sequences; None if the model has none.
        routers: Reports routed experts; None if it can't.
        watch: Called with the inputs of each pass after it has begun; None for nothing.
        reads_all: Whether the last hidden states of all tokens are read.
    """

    runner: ModelRunner
    table: SequenceTable
    upload: Uploader
    constraints: Constraints
    feed: TokenFeed
    unread: UnreadTokens
    chooser: TokenChooser
    runs_ahead: bool
    pooler: PromptPooler | None = None
    speculator: Speculator | None = None
    images: SequenceImages | None = None
    graphs: DecodeGraphs | None = None
    states: SequenceStates | None = None
    routers: Routers | None = None
    watch: Callable[[StepInputs], None] | None = None
    reads_all: bool = False

    def add(self, new: NewSequence) -> None:
        """Add a sequence to the table.

        Raises:
            ValueError: It is inconsistent, or needs an adapter or a part that is not here.
        """
        self.table.add(new, self.runner.adapters.slot_of(new.info.adapter))
        if new.parts and (media := PromptMedia.find(new.parts)) is not None:
            if self.images is None:
                raise ValueError(f"sequence {new.seq_id} has images, and the model takes none")
            self.images.add(new, media.items)
        if self.states is not None:
            self.states.add(new)

    @torch.inference_mode()
    def run(self, step: LaunchedStep) -> StepOutputs:
        """Run one step; errors as of `begin`."""
        begun = self.begin(step)
        return begun if isinstance(begun, StepOutputs) else self.end(begun)

    @torch.inference_mode()
    def begin(self, launched: LaunchedStep) -> StepOutputs | BegunStep:
        """Start one step of at least one row.

        A row of 0 tokens is a shared prefill, which samples from the logits of the row before.

        Returns:
            The outputs, or what `end` makes them of.

        Raises:
            ValueError: A row computes an unknown token or one without a block, or is no valid
                shared prefill.
            ModelError: The model's output is broken.
        """
        rows, num_tokens = launched.rows, launched.num_tokens
        num_drafts: IntArray | None = None
        if launched.num_drafts and self.speculator is not None:
            num_drafts = np.array(launched.num_drafts, np.int64)[launched.runs]
        table = self.table
        constrained = table.constrained[rows].any()
        if num_drafts is not None or constrained or table.adjusted[rows].any():
            # Penalties, masks and drafts depend on all earlier tokens.
            self.unread.write()
        ends = self._ends(rows, num_tokens)
        if self.runner.model.is_encoder:
            assert self.pooler is not None, "encoders make vectors alone"
            pooled = self.pooler.encode(rows, num_tokens)
            table.num_computed[rows] = ends
            return StepOutputs(pooled=pooled)
        samples = (ends == table.num_known[rows]) & ~table.pools[rows]
        step = _Pass(rows, np.zeros_like(rows), table.num_computed[rows], num_tokens)
        drafts: StepDrafts | None = None
        if num_drafts is not None and self.speculator is not None:
            num_drafts[~samples | (num_tokens != 1)] = 0
            if self.states is not None:
                num_drafts = self.states.draftable(num_tokens, num_drafts)
            drafts = self.speculator.begin(rows, num_tokens, num_drafts)
            step, samples = _with_drafts(step, drafts), np.repeat(samples, drafts.counts + 1)
        places = Places(step.rows[samples], step.ahead[samples])
        masks = self.constraints.begin(places) if constrained or self.constraints.in_use else None
        logits_of: IntArray | None = None
        if not num_tokens.all():
            step, samples, logits_of = _computing_rows(step, samples)
        scored = None
        if table.scores[step.rows].any():
            from .prompts import take_scored

            scored = take_scored(table, step.rows, step.num_tokens)
        routes = table.routes[rows].any()
        graphs = self.graphs
        if graphs and not routes and scored is None and samples.all():
            # A graph has no adapters, and one token for each sequence.
            plain = (table.adapter[rows] < 0).all() and len(step.rows) == len(rows)
            if self.images is not None and self.images.in_step(rows, table.num_computed[rows]):
                plain = False
            if plain and graphs.fits(num_tokens):
                return StepOutputs(self._replay(graphs, rows, masks))
        inputs, last_token = self._inputs(step, samples, scored, all_read=routes)
        if routes:
            from .routing import start_routed

            states = bool(table.pools[step.rows].any())
            start = partial(self.runner.start, inputs, with_states=states)
            about = step.rows, step.starts, step.num_tokens, last_token
            output = start_routed(self.routers, start, table, *about, last_token[samples])
        else:
            output = self.runner.start(inputs, with_states=bool(table.pools[step.rows].any()))
        if self.watch is not None:
            self.watch(inputs)
        table.num_computed[rows] = ends
        if self.states is not None:
            self.states.advance(rows, num_tokens, ends)
        return BegunStep(
            output, step, samples, scored, last_token, places, masks, logits_of, drafts
        )

    @torch.inference_mode()
    def end(self, begun: BegunStep) -> StepOutputs:
        """Wait for the forward pass, and make the outputs: sample, score prompts and pool.

        Raises:
            ModelError: The model's output is broken.
            RankError: A rank has failed.
        """
        begun.output.wait()
        step, places, masks, drafts = begun.step, begun.places, begun.masks, begun.drafts
        num_samples = int(begun.samples.sum())
        prompts = None
        if begun.scored is not None:
            from .prompts import score_prompts

            raw, kernels = self.chooser.raw, self.chooser.kernels
            logits = begun.output.logits[num_samples:]
            prompts = score_prompts(self.table, logits, begun.scored, raw=raw, kernels=kernels)
        pooled: Pooled = ()
        if (states := begun.output.states) is not None:
            pooled = self._pool(step, begun.last_token, states)
        outputs, columns = StepOutputs(prompts=prompts, pooled=pooled), NO_COLUMNS
        if (experts := begun.output.experts) is not None:
            outputs = outputs._replace(experts=experts.prompts())
            columns = experts.columns(self.table, places, begun.logits_of)
        logits = begun.output.logits[:num_samples]
        if begun.logits_of is not None:
            logits = logits[self.upload(begun.logits_of)[0]]
        if not len(places):
            return outputs
        if drafts is not None:
            outputs = outputs._replace(proposed=drafts.proposed, draft_rest=drafts.rest)
        if drafts is None or not drafts.verified:
            return outputs._replace(sampled=self._sample(logits, places, masks, columns))
        sampled, verified = self._verify(logits, places, masks, drafts, columns)
        return outputs._replace(sampled=sampled, verified=verified)

    def _ends(self, rows: IntArray, num_tokens: IntArray) -> IntArray:
        """Return the computed tokens of each row after the step.

        Raises:
            ValueError: As `begin`.
        """
        table = self.table
        ends: IntArray = table.num_computed[rows] + num_tokens
        room = table.num_blocks[rows] * self.runner.cache.block_size
        bad = (num_tokens < 0) | (ends > table.num_known[rows]) | (ends > room)
        if not num_tokens.all():
            bad |= (num_tokens == 0) & ~self._may_share(rows, num_tokens, ends)
        if bad.any():
            table.complain(int(rows[bad][0]), int(num_tokens[bad][0]))
        return ends

    def _may_share(self, rows: IntArray, num_tokens: IntArray, ends: IntArray) -> BoolArray:
        """Return which rows can share the prefill of the last computing row before them: it has as
        many known tokens and the same adapter, and samples."""
        table = self.table
        computing = np.where(num_tokens > 0, np.arange(len(num_tokens)), 0)
        leaders: IntArray = np.maximum.accumulate(computing)
        known, adapters, pools = table.num_known[rows], table.adapter[rows], table.pools[rows]
        same = (known == known[leaders]) & (adapters == adapters[leaders])
        samples = (ends == known) & ~pools
        may: BoolArray = same & samples & (samples & (num_tokens > 0))[leaders]
        return may

    def _pool(self, step: _Pass, last_token: IntArray, states: Tensor) -> Pooled:
        """Return the vectors of prompts that end in a step; `states`: `[tokens, hidden]`."""
        if self.pooler is None:
            raise ValueError("the plan has a prompt to pool, and the model makes no vectors")
        versions = self.runner.adapters.versions(self.table.adapter[step.rows])
        ends = (last_token + 1).tolist()
        bounds = zip((last_token + 1 - step.num_tokens).tolist(), ends, strict=True)
        own = ((index, states[start:end]) for index, (start, end) in enumerate(bounds))
        return self.pooler.take(step.rows, step.starts, own, versions)

    def _inputs(
        self,
        step: _Pass,
        samples: BoolArray,
        to_score: ScoredPlaces | None,
        *,
        all_read: bool | np.bool_,
    ) -> tuple[StepInputs, IntArray]:
        """Return the inputs of a pass, and the index of each row's last token. Logits of sampling
        rows come before those of prompts to score."""
        table = self.table
        firsts = step.starts if self.states is None else step.starts - step.ahead  # drafts in order
        order, num_decodes = order_rows(firsts, step.num_tokens)
        rows, starts, counts = step.rows[order], step.starts[order], step.num_tokens[order]
        width = -(-int((starts + counts).max()) // self.runner.cache.block_size)
        # Logits are in the plan's order, not in that of the batch.
        last_token = np.empty_like(order)
        last_token[order] = np.cumsum(counts) - 1
        logits_index = last_token[samples]
        if to_score is not None:
            before = last_token - step.num_tokens + 1 - step.starts
            scored = np.repeat(before[to_score.which], to_score.counts) + to_score.positions
            logits_index = np.concatenate((logits_index, scored))
        # All tokens of a decode step are read, and a vector may need any token of a prompt.
        all_read = all_read or num_decodes == len(rows) or self.reads_all or table.pools[rows].any()
        read = None if all_read else np.unique(logits_index)
        batch_rows = Rows(starts, counts, table.blocks[rows, :width], num_decodes, read)
        if self.states is not None:
            batch_rows = self.states.put_in(batch_rows, rows, step.ahead[order])
        images = self.images
        if images is not None:
            if images.concern(rows, starts):
                batch_rows = images.look_ahead(rows, batch_rows)
            else:
                images = None
        row_of_token, positions = batch_rows.flat
        input_ids = table.tokens[rows[row_of_token], positions]
        inputs = self.runner.builder.build(batch_rows, input_ids, logits_index)
        if (input_ids < 0).any():
            inputs = msgspec.structs.replace(inputs, input_ids=self.feed.resolve(inputs.input_ids))
        if images is not None:
            inputs = images.put_in(inputs, rows, batch_rows)
        if (table.adapter[rows] >= 0).any():
            inputs = msgspec.structs.replace(
                inputs, adapters=self.runner.adapters.step(table.adapter[rows][row_of_token])
            )
        return inputs, last_token

    def _replay(
        self, graphs: DecodeGraphs, rows: IntArray, masks: PendingMasks | None
    ) -> SampledRows:
        """Replay a step in which every row computes its last token and samples the next."""
        from ..runner.graphs import DecodeStep

        table = self.table
        positions = table.num_computed[rows]
        width = int(positions.max()) // self.runner.cache.block_size + 1
        step = DecodeStep(
            input_ids=table.tokens[rows, positions],
            positions=positions,
            tables=table.blocks[rows, :width],
            table_rows=rows,
            sampling=packed_sampling(table, rows),
            shift=table.position_shift[rows],
        )
        simple, plain = self.chooser.never_waits(rows)
        logits, *chosen = graphs.run(step, within=simple and not plain)
        table.num_computed[rows] += 1
        places = Places.next_of(rows)
        if not simple or (graphs.without_limits and not plain):
            return self._sample(logits, places, masks, NO_COLUMNS)
        return self.unread.add(places, *chosen, fed=True)

    def _sample(
        self, logits: Tensor, places: Places, masks: PendingMasks | None, columns: Columns
    ) -> SampledRows:
        """Choose a token for each place, without drafted tokens."""
        chosen: ChosenTokens | None
        if not self.runs_ahead or not (
            chosen := self.chooser.choose_ahead(logits, places.rows, self.upload)
        ):
            chosen = self.chooser.choose(logits, places, masks)
        return self._count(places, chosen.with_columns(columns) if columns else chosen)

    def _verify(
        self,
        logits: Tensor,
        places: Places,
        masks: PendingMasks | None,
        drafts: StepDrafts,
        columns: Columns,
    ) -> tuple[SampledRows, tuple[VerifiedDraft, ...]]:
        """Choose a token for each place, and keep those that count (`accept`).

        Waits for the tokens: the next step needs the sequences' lengths.
        """
        assert self.speculator is not None
        chosen = self.chooser.choose(logits, places, masks).with_columns(columns)
        unsure = None
        if masks is not None:
            found = masks.result()
            unsure = np.zeros(len(places), np.bool_)
            unsure[found.places] = found.unsure
        counts = self.speculator.accept(places, chosen.tokens.cpu().numpy(), unsure)
        firsts = np.flatnonzero(places.ahead == 0)
        rows, accepted = places.rows[firsts], np.add.reduceat(counts.astype(np.int64), firsts) - 1
        verified = self.speculator.verdicts(drafts, rows, accepted)
        self.table.num_computed[rows] += accepted
        if self.states is not None:
            self.states.roll_back(rows, accepted)
        return self._count(places[counts], chosen.of(counts)), verified

    def _count(self, places: Places, chosen: ChosenTokens) -> SampledRows:
        """Append these tokens to the sequences."""
        tokens = chosen.tokens
        if self.runs_ahead:
            # A row's last token is fed.
            last = np.append(places.ahead[1:] == 0, True)
            fed = tokens if last.all() else tokens[torch.from_numpy(last).to(tokens.device)]
            self.feed.put(self.upload(places.rows[last])[0], fed)
        versions = self.runner.adapters.versions(self.table.adapter[places.rows])
        return self.unread.add(
            places,
            tokens,
            chosen.logprobs,
            chosen.shares,
            top_logprobs=chosen.top_logprobs,
            fed=self.runs_ahead,
            adapter_versions=versions,
            columns=chosen.columns,
        )


def _computing_rows(step: _Pass, samples: BoolArray) -> tuple[_Pass, BoolArray, IntArray]:
    """Return the rows that have tokens, and whether they sample; and for each row that samples,
    shared prefills included, the index of its logits."""
    computes = step.num_tokens > 0
    logits_of: IntArray = np.cumsum(samples & computes)[samples] - 1
    return _Pass(*(part[computes] for part in step)), samples[computes], logits_of


def _with_drafts(step: _Pass, drafts: StepDrafts) -> _Pass:
    """Add a row for each drafted token, after the row of its sequence."""
    row, ahead = flatten_rows(np.zeros_like(step.rows), drafts.counts + 1)
    return _Pass(step.rows[row], ahead, step.starts[row] + ahead, step.num_tokens[row])
