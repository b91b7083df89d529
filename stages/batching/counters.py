"""What the batch builder counts."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """What was done since the last `BatchingCore.take_counters`.

    Attributes:
        prefilled: Tokens planned of prompts, and of what is computed again.
        decoded: Rows planned that compute one token each.
        cached: Tokens that needed no computing.
        recomputed: Of those prefilled, those that a preemption or a failure had lost.
        wasted: Tokens computed for sequences that had ended.
        full_hits: Sequences that started and found all their tokens in the prefix cache, but for
            the last one, which is computed in any case.
        partial_hits: Those that found some.
        misses: Those that found none.
        preemptions: Sequences that gave up their blocks for others.
        resumes: Sequences that started behind tokens which they had generated before.
    """

    prefilled: int = 0
    decoded: int = 0
    cached: int = 0
    recomputed: int = 0
    wasted: int = 0
    full_hits: int = 0
    partial_hits: int = 0
    misses: int = 0
    preemptions: int = 0
    resumes: int = 0
