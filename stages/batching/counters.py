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
            the last one, which is computed in any case; or forked, so that it is not.
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

    def count_start(self, num_tokens: int, num_cached: int, *, goes_on: bool) -> None:
        """A sequence starts with so many tokens, of which so many are cached.

        `goes_on`: it starts behind tokens of its own, since it was preempted or its lane failed.
        """
        self.cached += num_cached
        if not num_cached:
            self.misses += 1
        elif num_cached < num_tokens - 1:
            self.partial_hits += 1
        else:
            self.full_hits += 1
        if goes_on:
            self.resumes += 1
            self.recomputed += num_tokens - num_cached
