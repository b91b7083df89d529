"""Hooks of a stage's optional parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any


class Hooks:
    """For each hook of a base class, the methods of the parts that override it, in their order.

    So a hook that no part uses costs one empty loop.
    """

    def __init__(self, base: type, parts: Sequence[object]) -> None:
        """`base`: the parts' base class; its public methods, which do nothing, are the hooks."""
        for name, default in vars(base).items():
            if callable(default) and not name.startswith("_"):
                own = [part for part in parts if getattr(type(part), name) is not default]
                setattr(self, name, tuple([getattr(part, name) for part in own]))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]: ...
