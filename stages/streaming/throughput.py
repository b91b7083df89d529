"""How fast tokens come and how soon the first ones, as heartbeats tell it."""

from __future__ import annotations

from collections import deque

_LAST = 100
"""Requests whose first token is remembered."""

_LEAST_NS = 500_000_000
"""Over a shorter time a rate would say little; then it is what it was."""


class Throughput:
    """Counts tokens, and remembers the last waits for a first one. Times are the caller's."""

    def __init__(self, now_ns: int) -> None:
        self._tokens = 0
        self._since_ns = now_ns
        self._rate = 0
        self._waits_ns: deque[int] = deque(maxlen=_LAST)

    def add(self, tokens: int) -> None:
        """So many tokens have come."""
        self._tokens += tokens

    def first_token(self, waited_ns: int) -> None:
        """A request that has ended had waited so long for its first one."""
        self._waits_ns.append(waited_ns)

    def load(self, now_ns: int) -> dict[str, int | float]:
        """Tokens per second since the last call, and of the last requests the median and the 95th
        percentile of the time to the first token; without these as long as there was none."""
        passed_ns = now_ns - self._since_ns
        if passed_ns >= _LEAST_NS:
            self._rate = round(self._tokens / (passed_ns / 1e9))
            self._tokens, self._since_ns = 0, now_ns
        load: dict[str, int | float] = {"tokens_per_s": self._rate}
        if waits := sorted(self._waits_ns):
            for name, share in (("ttft_ms_p50", 0.5), ("ttft_ms_p95", 0.95)):
                load[name] = round(waits[int(share * (len(waits) - 1))] / 1e6, 1)
        return load
