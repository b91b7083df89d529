"""What ended a sample: a stop token, or which of its stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from ...bus.public import CompletionSample
from ...config import SamplingParams
from .words import Words


def matched_stop(sample: CompletionSample, sampling: SamplingParams, words: Words) -> int | str:
    """What ended a sample whose finish reason is "stop": the token's id, or the stop string."""
    if ends_with_stop_token(sample, sampling, words):
        return sample.token_ids[-1]
    text = words.text(sample.token_ids, skip_special=True)
    free = free_of_stops(sample.token_ids, sampling, words, skip_special=True)
    return first_stop(text[free:], sampling.stop)[0]


def ends_with_stop_token(
    sample: CompletionSample, sampling: SamplingParams, words: Words | None
) -> bool:
    """The same as a question. Takes the tokenizer only where there are stop strings."""
    return words is None or is_stop_token(sample.token_ids[-1], sampling, words)


def is_stop_token(token_id: int, sampling: SamplingParams, words: Words) -> bool:
    """Whether the last token of a sample whose finish reason is "stop" is a stop token."""
    if not sampling.stop:
        return True
    stops = sampling.stop_token_ids
    if not sampling.ignore_eos:
        stops |= words.stop_token_ids
    return token_id in stops


def free_of_stops(
    token_ids: Sequence[int], sampling: SamplingParams, words: Words, *, skip_special: bool
) -> int:
    """How long the text is in which no stop string was looked for."""
    return len(words.text(token_ids[: sampling.min_tokens], skip_special=skip_special))


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, int]:
    """The stop string that is complete first, of several the longest, and where it begins."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, _, stop = min(found, default=(len(text), 0, ""))
    return stop, end - len(stop)
