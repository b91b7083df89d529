"""Sessions: conversations whose KV is kept between turns."""

from __future__ import annotations

from ..kv_sessions import AfterTurn, KVSession, KVSessionResult, SessionTier
from ..sections import Section


class SessionTurn(Section, frozen=True):
    """In AdmittedRequest: the request is a turn of a session, as in GenerateRequest."""

    session: KVSession


class SessionGrant(Section, frozen=True):
    """In NewSequence and StartedSequence: what a turn of a session may leave in the KV cache.

    Decided when the turn starts.

    Attributes:
        after: As in KVSession.
        num_blocks: Most full blocks that are pinned at its end.
        block_size: Tokens per block.
        tiers: Whether there are tiers below the device.
        reason: Why no more is granted, or nothing.
    """

    after: AfterTurn
    num_blocks: int
    block_size: int
    tiers: bool = False
    reason: str = ""

    def result(self, num_tokens: int) -> KVSessionResult:
        """Return what the request is answered, which ends with so many tokens in all."""
        if self.reason and not self.num_blocks:
            return KVSessionResult(outcome="rejected", reason=self.reason)
        if self.after == "release":
            return KVSessionResult(outcome="accepted")
        num_full = max(num_tokens - 1, 0) // self.block_size
        number = num_full if self.after == "demote" else min(num_full, self.num_blocks)
        tier: SessionTier = "host" if self.after == "demote" and self.tiers else "device"
        return KVSessionResult(
            outcome="clipped" if number < num_full else "accepted",
            num_tokens=number * self.block_size,
            tier=tier if number else "",
            reason=self.reason if number < num_full else "",
        )
