"""A second model, that never changes: how likely it finds what the first one has made.

It scores a sample when that has ended, in one pass over prompt and completion, or several where
these are more tokens than a step takes. What is computed is what `InferenceEngine.score` computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ...bus.messages import (
    NewSequence,
    RequestInfo,
    SequenceSpec,
    StepPlan,
)
from ...bus.scoring import SampleScored, ScoreSample
from ...config import EngineConfig, ModelError, SamplingParams
from .core import ExecutorCore
from .runner.model import load_model


class ReferenceModel:
    """The reference model of a lane, with KV for one sequence of the full length, or some shorter.

    All methods run on the thread of the lane's own model, between its steps.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads it: before the lane's own model, whose KV takes what memory is left.

        Args:
            config: The lane's; all but the model's folder is the same for both.

        Raises:
            ModelError: It can't be loaded.
        """
        # It decodes nothing, so it needs neither graphs nor drafts.
        own = msgspec.structs.replace(
            config,
            model_path=config.reference_model_path,
            reference_model_path="",
            speculation="off",
            cuda_graphs="off",
        )
        try:
            model = load_model(own)
        except ModelError as error:
            raise ModelError(f"the reference model: {error.message}") from error
        blocks = -(-model.max_model_len // config.block_size)
        self._core = ExecutorCore(own, model=model, num_blocks=blocks)
        self._most_tokens = config.max_tokens_per_batch
        self._most_samples = self._core.max_batch_size

    def check_fits(self, core: ExecutorCore) -> None:
        """Whether it can score all that the lane's own model makes.

        Raises:
            ModelError: It can't.
        """
        own, other = self._core.model, core.model
        if own.vocab_size < other.vocab_size:
            raise ModelError(
                f"the reference model has {own.vocab_size} tokens and the model that it is to "
                f"score has {other.vocab_size}; give one with the same tokenizer"
            )
        if own.max_model_len < other.max_model_len:
            raise ModelError(
                f"the reference model takes {own.max_model_len} tokens and the model that it is to "
                f"score makes up to {other.max_model_len}; set max_model_len to "
                f"{own.max_model_len}"
            )

    def close(self) -> None:
        """Gives up weights and KV; the object is of no use then."""
        self._core.close()

    def score(self, samples: Sequence[ScoreSample]) -> Iterator[tuple[SampleScored, ...]]:
        """Scores samples; a pass runs whenever the next result is asked for.

        Yields:
            For each pass the samples of which all tokens are known by then, perhaps none. One
            iteration has to be over, or given up, before another begins.

        Raises:
            ModelError: The model's output is broken.
        """
        for some in self._together(samples):
            yield from self._score_together(some)

    def _together(self, samples: Sequence[ScoreSample]) -> Iterator[list[ScoreSample]]:
        """Those that fit one pass, or one that alone is longer."""
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
        # Only one that is alone is longer than a pass.
        for start in range(0, longest, self._most_tokens):
            counts = [min(len(seq.token_ids) - start, self._most_tokens) for seq in new]
            result = self._core.execute(_plan(() if start else new, counts))
            for prompt in result.prompt_logprobs:
                logprobs[prompt.seq_id] += prompt.logprobs
            is_last = start + self._most_tokens >= longest
            yield tuple(map(_scored, samples, logprobs)) if is_last else ()


def _sequence(seq_id: int, sample: ScoreSample, blocks: range) -> NewSequence:
    """All of a sample as a prompt whose logprobs are asked for; the token behind it is not used."""
    sampling = SamplingParams(
        max_tokens=1, ignore_eos=True, temperature=sample.temperature, prompt_logprobs=0
    )
    num_tokens = len(sample.token_ids)
    info = RequestInfo(sample.request_id, sample.entry_id, "", 1, False, (), num_tokens, "", "", 0)
    spec = SequenceSpec(seq_id, 0, 0)
    return NewSequence(seq_id, sample.token_ids, 0, 0, tuple(blocks), sampling, spec, info)


def _plan(new: Sequence[NewSequence], counts: Sequence[int]) -> StepPlan:
    """The next tokens of sequences 0, 1 and so on."""
    rows = tuple(range(len(counts)))
    return StepPlan(1, tuple(new), rows, tuple(counts), (), (), (), (), 0)


def _scored(sample: ScoreSample, logprobs: Sequence[float]) -> SampleScored:
    """`logprobs`: of all tokens but the first."""
    wanted = tuple(logprobs[sample.start - 1 :])
    return SampleScored(sample.request_id, sample.entry_id, sample.sample_index, wanted)
