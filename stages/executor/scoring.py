"""Scoring by a reference model: the logprobs of samples of the lane's model.

It never changes, unless it is the model itself before its weights became codes: updates replace
both.

A sample is scored when it has ended, in one pass over prompt and completion, or in several passes
if it exceeds a step's tokens. The result is that of `InferenceEngine.score`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from ...bus.control import SampleScored, ScoreSample
from ...bus.links import CONTROL
from ...bus.messages import RequestInfo, SequenceSpec
from ...bus.parts.scoring import PromptScores
from ...bus.steps import NewSequence, StepPlan
from ...config import EngineConfig, ModelError, SamplingParams
from ..actor import Actor
from .core import ExecutorCore
from .runner.model import load_model


class ReferenceModel:
    """The reference model, with KV for one sequence of full length, or several shorter ones.

    All methods run on the thread of the lane's model, between its steps.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Load it, before the lane's model is, whose KV takes the remaining memory.

        Args:
            config: The lane's settings, used but for the model's folder.

        Raises:
            ModelError: It can't be loaded.
        """
        # It never decodes, so it needs neither graphs nor drafts.
        own = msgspec.structs.replace(config.of_reference(), speculation="off", cuda_graphs="off")
        try:
            model = load_model(own)
        except ModelError as error:
            raise ModelError(f"the reference model: {error.message}") from error
        blocks = -(-model.max_model_len // config.block_size)
        self._core = ExecutorCore(own, model=model, num_blocks=blocks)
        self._most_tokens = config.max_tokens_per_batch
        self._most_samples = self._core.max_batch_size

    def check_fits(self, core: ExecutorCore) -> None:
        """Raises ModelError if it can't score all samples of the lane's model."""
        own, other = self._core.model, core.model
        if own.vocab_size < other.vocab_size:
            raise ModelError(
                f"the reference model has {own.vocab_size} tokens and the scored model has "
                f"{other.vocab_size}; give one with the same tokenizer"
            )
        if own.max_model_len < other.max_model_len:
            raise ModelError(
                f"the reference model takes {own.max_model_len} tokens and the scored model "
                f"makes up to {other.max_model_len}; set max_model_len to {own.max_model_len}"
            )

    @property
    def module(self) -> nn.Module:
        """The model's module."""
        return self._core.model.module

    def close(self) -> None:
        """Free weights and KV; the object is unusable then."""
        self._core.close()

    def score(self, samples: Sequence[ScoreSample]) -> Iterator[tuple[SampleScored, ...]]:
        """Score samples lazily: each next result runs a pass.

        Yields:
            For each pass, the completed samples, perhaps none. End one iteration before another.

        Raises:
            ModelError: The model's output is broken.
        """
        for some in self._together(samples):
            yield from self._score_together(some)

    def _together(self, samples: Sequence[ScoreSample]) -> Iterator[list[ScoreSample]]:
        """Batches of samples that fit one pass, or a single longer one."""
        some: list[ScoreSample] = []
        tokens = blocks = 0
        size, room = self._core.cache.block_size, self._core.cache.num_blocks
        for sample in samples:
            own_tokens = len(sample.token_ids)
            own_blocks = -(-own_tokens // size)
            fits = tokens + own_tokens <= self._most_tokens and blocks + own_blocks <= room
            if some and not (fits and len(some) < self._most_samples):
                yield some
                some, tokens, blocks = [], 0, 0
            some.append(sample)
            tokens, blocks = tokens + own_tokens, blocks + own_blocks
        if some:
            yield some

    def _score_together(self, samples: Sequence[ScoreSample]) -> Iterator[tuple[SampleScored, ...]]:
        self._core.reset()
        new, block = [], 0
        for seq_id, sample in enumerate(samples):
            stop = block - (-len(sample.token_ids) // self._core.cache.block_size)
            new.append(_sequence(seq_id, sample, range(block, stop)))
            block = stop
        logprobs: list[list[float]] = [[] for _ in samples]
        longest = max(len(sample.token_ids) for sample in samples)
        # Only a single sample is longer than a pass.
        for start in range(0, longest, self._most_tokens):
            counts = [min(len(seq.token_ids) - start, self._most_tokens) for seq in new]
            result = self._core.execute(_plan(() if start else new, counts))
            scores = PromptScores.find(result.parts)
            for prompt in scores.prompts if scores is not None else ():
                logprobs[prompt.seq_id] += prompt.logprobs
            is_last = start + self._most_tokens >= longest
            yield tuple(map(_scored, samples, logprobs)) if is_last else ()


def _sequence(seq_id: int, sample: ScoreSample, blocks: range) -> NewSequence:
    """A sample as a prompt with logprobs; the sampled token after it is not used."""
    sampling = SamplingParams(
        max_tokens=1, ignore_eos=True, temperature=sample.temperature, prompt_logprobs=0
    )
    info = RequestInfo(sample.request_id, sample.entry_id)
    spec = SequenceSpec(seq_id, 0, 0)
    return NewSequence(seq_id, sample.token_ids, 0, 0, tuple(blocks), sampling, spec, info)


def _plan(new: Sequence[NewSequence], counts: Sequence[int]) -> StepPlan:
    """A plan of the next tokens of sequences 0, 1 and so on."""
    rows = tuple(range(len(counts)))
    return StepPlan(1, tuple(new), rows, tuple(counts), (), (), (), (), 0)


def _scored(sample: ScoreSample, logprobs: Sequence[float]) -> SampleScored:
    """`logprobs`: of all tokens but the first; empty if the sample can't be scored."""
    wanted = tuple(logprobs[sample.start - 1 :])
    return SampleScored(sample.request_id, sample.entry_id, sample.sample_index, wanted)


@dataclass(eq=False)
class Scoring:
    """The queue of samples to score, one pass at a time, between steps.

    Attributes:
        stage: The executor stage.
        reference: The model that scores; None without one.
        on_torch: Calls a function on the torch thread.
        lost: Returns why the reference model's weights are a mixture; "" if they aren't.
    """

    stage: Actor
    reference: ReferenceModel | None
    on_torch: Callable[..., Awaitable[Any]]
    lost: Callable[[], str] = str

    def __post_init__(self) -> None:
        # (epoch, sample)
        self._asked: asyncio.Queue[tuple[int, ScoreSample]] = asyncio.Queue()

    def ask(self, sample: ScoreSample) -> None:
        """Queue a sample; a new epoch drops it."""
        self._asked.put_nowait((self.stage.epoch, sample))

    async def score_forever(self) -> None:
        """Score queued samples, and send the results to streaming."""
        while True:
            asked = [await self._asked.get()]
            while not self._asked.empty():
                asked.append(self._asked.get_nowait())
            epoch = self.stage.epoch
            samples = [sample for asked_in, sample in asked if asked_in == epoch]
            if self.reference is None or self.lost():
                await self._send([_scored(sample, ()) for sample in samples], epoch)
                continue
            passes = self.reference.score(samples)
            while epoch == self.stage.epoch:
                scored = await self.on_torch(next, passes, None)
                if scored is None:
                    break
                await self._send(scored, epoch)

    def close(self) -> None:
        """Free the reference model; on its thread."""
        if self.reference is not None:
            self.reference.close()
            self.reference = None

    async def _send(self, scored: Sequence[SampleScored], epoch: int) -> None:
        for sample in scored:
            await self.stage.send(CONTROL["streaming"], sample, epoch=epoch)
