"""A lane with scripted drafts: right, wrong, or right for a while."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import ClassVar

from nano_inference.bus.messages import Dispatch, RequestInfo, SequenceSpec, StepResult
from nano_inference.config import EngineConfig, SamplingParams
from nano_inference.stages.batching import BatchingCore
from nano_inference.stages.executor import ExecutorCore
from nano_inference.stages.executor.driver.speculation.drafts import NO_DRAFT, Draft, DraftContext
from nano_inference.stages.executor.driver.speculation.speculator import Speculator
from nano_inference.stages.executor.driver.step import LaunchedStep

Row = tuple[int, float, str, object]
"""A token, its logprob, why the sample ends with it, and the likeliest ones."""

MOST_STEPS = 2000

CONFIG = EngineConfig(
    block_size=4,
    kv_cache_bytes=1 << 20,
    max_batch_size=6,
    max_tokens_per_batch=24,
    max_draft_tokens=7,
)
"""A lane so small that blocks run short."""


class VerifyAll:
    """The control that takes whatever is proposed, as far as a step's rows go."""

    def __init__(self, max_rows: int = 64) -> None:
        self._max_rows = max_rows

    def add(self, row: int) -> None:
        pass

    def expected(self, row: int, draft: Draft) -> list[float]:
        return [1.0] * len(draft.tokens)

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

    def spent(self, num_asked: int, seconds: float, num_accepted: int) -> None:
        pass

    def value(self, num_verified: int, num_accepted: int) -> tuple[float, float]:
        return 0.0, 1.0

    def settle(self, row: int, draft: Draft, got: Sequence[int]) -> None:
        pass

    def timed(self, seconds: float) -> None:
        pass

    def forget(self, row: int) -> None:
        pass

    def clear(self) -> None:
        pass


class MadeUpDrafts:
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

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._propose(context) for context in contexts]

    def forget(self, row: int, seq_id: int) -> None:
        pass

    def clear(self) -> None:
        pass

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


class DraftingLane:
    """Batching and executor, with steps in flight.

    Attributes:
        found: The rows of each sequence.
        drafted: Verified drafted tokens.
        accepted: Accepted ones.
        steps: Their number.
        most_rows: The most rows of one token in a step, drafted ones included.
        most_in_flight: The most steps in flight.
    """

    def __init__(self, config: EngineConfig, core: ExecutorCore, steps_ahead: int = 2) -> None:
        self.core = core
        self.batching = BatchingCore(config, core.capacity(), steps_ahead=steps_ahead)
        self.found: dict[int, list[Row]] = {}
        self.drafted = self.accepted = self.steps = self.most_rows = self.most_in_flight = 0
        self._in_flight: deque[LaunchedStep | StepResult] = deque()

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
        core._speculator = core._steps.speculator = speculator

    def add(self, seq_id: int, sampling: SamplingParams, prompt: Sequence[int]) -> None:
        name = f"r{seq_id}"
        info = RequestInfo(name, name)
        self.found[seq_id] = []
        spec = SequenceSpec(seq_id, 0, seed=seq_id)
        self.batching.add(Dispatch(info, tuple(prompt), sampling, (spec,), priority=0))

    def turn(self) -> bool:
        """Run all steps that can be planned, then take the result of the oldest step."""
        run = self.core.launch if self.core.runs_ahead else self.core.execute
        while (plan := self.batching.plan(0)) is not None:
            self._in_flight.append(run(plan))
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        if not self._in_flight:
            return False
        oldest = self._in_flight.popleft()
        result = oldest if isinstance(oldest, StepResult) else self.core.finish(oldest)
        self.batching.absorb(result.summary())
        self._record(result)
        self.steps += 1
        return True

    def run(self) -> dict[int, list[Row]]:
        for _ in range(MOST_STEPS):
            if not self.turn():
                self.batching.check()
                assert self.batching.idle
                return self.found
        raise AssertionError("the lane does not finish")

    def _record(self, result: StepResult) -> None:
        tops = result.top_logprobs or ((),) * len(result.seq_ids)
        for seq_id, token, logprob, reason, top in zip(
            result.seq_ids,
            result.token_ids,
            result.logprobs,
            result.finish_reasons,
            tops,
            strict=True,
        ):
            rows = self.found[seq_id]
            assert not (rows and rows[-1][2]), "a token after the end"
            rows.append((token, logprob, reason, tuple(token_id for token_id, _ in top)))
        rows = len(set(result.seq_ids)) + sum(draft.num_tokens for draft in result.drafts)
        self.most_rows = max(self.most_rows, rows)
        for draft in result.drafts:
            assert 0 <= draft.num_accepted <= draft.num_tokens
            self.drafted += draft.num_tokens
            self.accepted += draft.num_accepted
