"""A lane with scripted drafts: right, wrong, or right for a while."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pytest

from nano_inference.bus.parts.columns import SUPPORT_LOGPROBS
from nano_inference.bus.steps import StepPlan, StepResult
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.speculation.control import Acceptance, CostControl
from nano_inference.stages.executor.driver.speculation.costs import StepCosts
from nano_inference.stages.executor.driver.speculation.drafts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    DraftSource,
)
from nano_inference.stages.executor.driver.speculation.speculator import Speculator
from nano_inference.stages.executor.parts.speculation import Speculation

from .....sections import columns_of, drafts_of, prompt_logprobs_of
from ...lane import StepLane

Row = tuple[int, float, str, object, float | None]
"""A token, its logprob, why the sample ends with it, the likeliest ones, and log S."""

CONFIG = EngineConfig(
    block_size=4,
    kv_cache_bytes=1 << 20,
    max_batch_size=6,
    max_tokens_per_batch=24,
    max_draft_tokens=7,
)
"""A lane so small that blocks run short."""


class Sure(Acceptance):
    """Expects every drafted token to be right."""

    def expected(self, row: int, draft: Draft) -> list[float]:
        return [1.0] * len(draft.tokens)


class VerifyAll(CostControl):
    """The control that takes whatever is proposed, as far as a step's rows go."""

    def __init__(self, max_rows: int = 64) -> None:
        super().__init__(StepCosts([1], [1.0]), max_rows=max_rows)
        self.acceptance = Sure()

    def begin(self, num_rows: int, num_prefill: int, context: float) -> bool:
        self._left = self._max_rows - num_rows - num_prefill
        return self._left > 0

    def rest(self) -> int:
        return 0

    def lengths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        left = self._left
        lengths = []
        for chance in chances:
            lengths.append(min(len(chance), left))
            left -= lengths[-1]
        return lengths

    def value(self, num_verified: int, num_accepted: int) -> tuple[float, float]:
        return 0.0, 1.0


class MadeUpDrafts(DraftSource):
    """Drafts of the coming tokens, with errors.

    Args:
        answers: By sequence, what comes without drafts.
        right: How likely each drafted token is the right one.
        vocab_size: Wrong ones are any of the others.
    """

    name: ClassVar[str] = "made up"

    def __init__(
        self, answers: Mapping[int, Sequence[int]], right: float, vocab_size: int, seed: int = 0
    ) -> None:
        self._answers = answers
        self._right = right
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def _propose(self, context: DraftContext) -> Draft:
        generated = context.tokens[context.num_prompt :].tolist()
        assert generated == list(self._answers[context.seq_id][: len(generated)])
        place = len(context.tokens) - context.num_prompt
        coming = list(self._answers[context.seq_id][place : place + context.limit])
        coming += [self._any() for _ in range(context.limit - len(coming))]
        length = self._random.randint(0, context.limit)
        tokens = tuple(
            token if self._random.random() < self._right else self._any()
            for token in coming[:length]
        )
        return Draft(tokens, source=self.name) if tokens else NO_DRAFT

    def _any(self) -> int:
        return self._random.randrange(self._vocab_size)


class DraftingLane(StepLane):
    """A lane that keeps the rows of its sequences.

    Attributes:
        found: The rows of each sequence.
        prompts: The logprobs of each prompt that is scored.
        drafted: Verified drafted tokens.
        accepted: Accepted ones.
        most_rows: The most rows of one token in a step, drafted ones included.
    """

    def __init__(self, config: EngineConfig, core: ExecutorCore, **options: int) -> None:
        super().__init__(config, core, **{"steps_ahead": 2, **options})
        self.found: dict[int, list[Row]] = {}
        self.prompts: dict[int, list[float]] = {}
        self.drafted = self.accepted = self.most_rows = 0

    def draft(
        self,
        answers: Mapping[int, Sequence[Row]],
        right: float,
        seed: int = 0,
        *,
        control: VerifyAll | None = None,
    ) -> None:
        """Drafts come from answers that are known, from now on."""
        core = self.core
        tokens = {seq_id: [row[0] for row in rows] for seq_id, rows in answers.items()}
        source = MadeUpDrafts(tokens, right, core.model.vocab_size, seed)
        control = control or VerifyAll()
        speculator = Speculator(core._table, core.constraints, [source], control)
        core.part(Speculation).use(speculator)

    def add(
        self, seq_id: int, sampling: SamplingParams, prompt: Sequence[int], adapter: str = ""
    ) -> None:
        self.found[seq_id] = []
        super().add(seq_id, sampling, prompt, adapter)

    def run(self) -> dict[int, list[Row]]:
        self.finish()
        return self.found

    def record(self, plan: StepPlan, result: StepResult) -> None:
        number = len(result.seq_ids)
        tops = result.top_logprobs or ((),) * number
        supports = columns_of(result).get(SUPPORT_LOGPROBS, (None,) * number)
        for seq_id, token, logprob, reason, top, support in zip(
            result.seq_ids,
            result.token_ids,
            result.logprobs,
            result.finish_reasons,
            tops,
            supports,
            strict=True,
        ):
            rows = self.found[seq_id]
            assert not (rows and rows[-1][2]), "a token after the end"
            rows.append((token, logprob, reason, tuple(token_id for token_id, _ in top), support))
        for scored in prompt_logprobs_of(result):
            self.prompts.setdefault(scored.seq_id, []).extend(scored.logprobs)
        rows = len(set(result.seq_ids)) + sum(draft.num_tokens for draft in drafts_of(result))
        self.most_rows = max(self.most_rows, rows)
        for draft in drafts_of(result):
            assert 0 <= draft.num_accepted <= draft.num_tokens
            self.drafted += draft.num_tokens
            self.accepted += draft.num_accepted


def assert_same(found: dict[int, list[Row]], expected: dict[int, list[Row]]) -> None:
    assert found.keys() == expected.keys()
    for seq_id, rows in expected.items():
        assert [(row[0], *row[2:4]) for row in found[seq_id]] == [(r[0], *r[2:4]) for r in rows]
        for number in (1, 4):
            wanted = [row[number] for row in rows]
            assert [row[number] for row in found[seq_id]] == pytest.approx(wanted, abs=1e-4)
