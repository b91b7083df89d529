"""Conversations whose KV is kept between their turns: parts of messages. docs/kv-sessions.md."""

from __future__ import annotations

from typing import Literal

from .public_base import OutputPart, PublicPart

SessionAction = Literal["pin", "release", "demote", "prefetch"]
"""A call's action on the KV of a session. docs/kv-sessions.md."""

AfterTurn = Literal["pin", "release", "demote"]
"""Treatment of a session's KV when a turn ends."""

SessionOutcome = Literal["accepted", "clipped", "deferred", "rejected", "missing"]


SessionTier = Literal["device", "host", ""]


class KVSession(PublicPart, frozen=True, kw_only=True, omit_defaults=True):
    """The conversation of which a request is a turn, and the fate of its KV after the turn.

    Attributes:
        id: The client's name for the conversation, unique within the tenant.
        ttl_s: Seconds after the turn for which the session is known, and its KV is kept at most.
        after: "pin": keep the KV on the device. "release": leave it to the prefix cache. "demote":
            store it in the tiers below the device, and free its blocks first.
    """

    id: str
    ttl_s: float = 300.0
    after: AfterTurn = "pin"


class KVSessionResult(OutputPart, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a request or call about a session's KV.

    Attributes:
        outcome: "accepted". "clipped": for leading tokens only. "deferred": done later, when a turn
            ends or blocks have come from disk. "rejected": not allowed, or no room. "missing":
            the session is not known, or its KV is gone.
        num_tokens: Leading tokens for which it was done.
        tier: Where their KV is: "device", "host", or "" without tokens.
        reason: Why it was not accepted, for people.
    """

    outcome: SessionOutcome
    num_tokens: int = 0
    tier: SessionTier = ""
    reason: str = ""
