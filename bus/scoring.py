"""Messages between streaming and an executor about samples for the reference model."""

from __future__ import annotations

from .control import Internal


class ScoreSample(Internal, frozen=True):
    """Streaming to an executor: score a finished sample with the reference model.

    Answered in the same epoch, with SampleScored.

    Attributes:
        token_ids: `[prompt + completion]`.
        start: Position of the first token to score, at least 1.
        temperature: Of the logprobs.
    """

    request_id: str
    entry_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    start: int
    temperature: float


class SampleScored(Internal, frozen=True):
    """An executor to streaming: the logprobs of `ScoreSample.token_ids` from `start` on.

    Empty if this executor has no reference model.
    """

    request_id: str
    entry_id: str
    sample_index: int
    logprobs: tuple[float, ...]
