"""Sections of messages: what an optional part of one stage sends to its counterpart in another.

A message carries sections in its field `parts`; a core passes them on unread. On the wire a section
is an array that begins with its class's name. It is decoded when its part looks for it, so a stage
needs no class of a part that it doesn't have.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar

import msgspec

Message = TypeVar("Message", bound=msgspec.Struct)


class Section(msgspec.Struct, frozen=True, tag=True, tag_field="type", array_like=True):
    """A part's section of a message. Class names are unique over all parts."""

    for_batching: ClassVar[bool] = False
    """For a section of a StepResult: whether the StepSummary has it, too."""

    @property
    def ended(self) -> tuple[int, ...]:
        """For a section of a StepResult: sequences that end without a token."""
        return ()

    @classmethod
    def find(cls, parts: Sections) -> Self | None:
        """Return the section of this class; None if there is none.

        Raises:
            ValidationError: A section of this name from another process has other fields.
        """
        for part in parts:
            if type(part) is cls:
                return part
            if type(part) is list and part[0] == cls.__name__:
                return cls.decode(part)
        return None

    @classmethod
    def decode(cls, section: Any) -> Self:
        """Return a section of this class, which is perhaps an array yet.

        Raises:
            ValidationError: As `find`.
        """
        return section if type(section) is cls else msgspec.convert(section, cls)

    def concerns(self, seq_ids: set[int]) -> bool:
        """For a section of a step: return whether this is about one of these sequences, besides its
        rows.
        """
        return False

    def replaced_in(self, parts: Sections) -> Sections:
        """Return the sections with this one in place of that of its class, if there is one."""
        name = type(self).__name__
        return (*(part for part in parts if name_of(part) != name), self)


def with_sections(message: Message, *sections: Section) -> Message:
    """Return a message with `parts`, in which these sections replace those of their classes."""
    parts: Sections = message.parts  # type: ignore[attr-defined]
    for section in sections:
        parts = section.replaced_in(parts)
    replaced: Message = msgspec.structs.replace(message, parts=parts)
    return replaced


Sections = tuple[Any, ...]
"""Sections of a message, at most one of each class; arrays until `Section.find` decodes them."""


def name_of(section: object) -> str:
    """Return the class's name of a section, decoded or not."""
    return str(section[0]) if isinstance(section, list) else type(section).__name__
