"""Optional features of the stages, as parts that a stage's core calls by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from ..bus.sections import Section


class Part:
    """Base of the stages' base classes of parts, whose public methods are the hooks.

    Hooks do nothing unless a part overrides them.

    Attributes:
        reads: Class of the section that the part reads in its stage's messages.
        handles: Classes of the messages that only parts understand, and this one does.
    """

    reads: ClassVar[type[Section] | None] = None
    handles: ClassVar[tuple[type, ...]] = ()


P = TypeVar("P", bound=Part)
Kind = TypeVar("Kind", bound=Part)


class Parts(Generic[P]):
    """The parts of a core, in the order in which their hooks run.

    Each hook of the base class is an attribute: the methods of the parts that override it. So a
    hook that no part uses costs one empty loop.

    Attributes:
        all: The parts.
        readers: By the name of a section, its `decode` and the part that reads it.
    """

    def __init__(self, base: type[P], parts: Iterable[P] = ()) -> None:
        """`base`: the stage's base class of parts."""
        self._base = base
        self.use(parts)

    def use(self, parts: Iterable[P]) -> None:
        """Replace the parts."""
        self.all = tuple(parts)
        self._by_class: dict[type[Part], P] = {type(part): part for part in self.all}
        self.readers = {
            part.reads.__name__: (part.reads.decode, part)
            for part in self.all
            if part.reads is not None
        }
        for name, default in vars(self._base).items():
            if callable(default) and not name.startswith("_"):
                own = [part for part in self.all if getattr(type(part), name) is not default]
                setattr(self, name, tuple([getattr(part, name) for part in own]))

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the part of a class; None if it is not in use."""
        return cast(Kind | None, self._by_class.get(kind))

    def get(self, kind: type[Kind]) -> Kind:
        """Return the part of a class. Raises KeyError if it is not in use."""
        return cast(Kind, self._by_class[kind])

    def handlers(self, message: object) -> list[P]:
        """Return the parts that handle a message."""
        return [part for part in self.all if isinstance(message, part.handles)]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]: ...
