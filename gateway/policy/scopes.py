"""What a caller may be for, and what an endpoint asks for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

Scope = Literal["read", "generate", "weights", "admin"]
"""What a caller may do: "read", ask what there is and how it is; "generate", have tokens made;
"weights", change the weights, the cache and the pace that all share; "admin", change who may do
what."""

SCOPES: tuple[Scope, ...] = ("read", "generate", "weights", "admin")

Needed = Scope | Literal["nothing"]
"""What an endpoint asks for; "nothing" of those that answer anybody, such as probes."""


def may(scopes: Collection[Scope], needed: Needed) -> bool:
    """Whether a caller with some scopes may call what needs one. Each of them includes "read"."""
    return needed == "nothing" or needed in scopes or (needed == "read" and bool(scopes))
