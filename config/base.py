"""What every section of the settings is."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

import msgspec

from .errors import ConfigError

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all settings: immutable, and strict about what it is given.

    Nothing shows the value of a setting that is named in `SECRETS`.
    """

    SECTION: ClassVar[str] = ""
    SECRETS: ClassVar[frozenset[str]] = frozenset()

    def require(self, name: str, holds: bool, wanted: str) -> None:
        """Raises ConfigError naming the setting unless `holds`."""
        if not holds:
            shown = f"{self.SECTION}.{name}" if self.SECTION else name
            value = self._shown(name)
            raise ConfigError(f"{shown} is {value!r}; it must be {wanted}")

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """As tracebacks with the values of variables show it."""
        return [(name, self._shown(name)) for name in self.__struct_fields__]

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({', '.join(fields)})"

    def __hash__(self) -> int:
        """Of the values, also of those that are dicts or lists, which have none by themselves."""
        return hash(tuple(_hashable(getattr(self, name)) for name in self.__struct_fields__))

    def _shown(self, name: str) -> Any:
        value = getattr(self, name)
        return "***" if value and name in self.SECRETS else value


class Section(Settings, frozen=True):
    """Settings of which each is checked where they are built, from Python too."""

    def __post_init__(self) -> None:
        """Raises ConfigError naming the first setting of a wrong type, or out of range.

        A list for a tuple, and a path for its text, are taken as what they stand for.
        """
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
            try:
                value = msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                shown = f"{self.SECTION}.{field.name}" if self.SECTION else field.name
                names = ", ".join(_names_in(field.type))
                hint = f"; choose from {names}" if names else ""
                raise ConfigError(f"{shown}: {error}{hint}") from None
            msgspec.structs.force_setattr(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Raises ConfigError where a setting is out of range, or does not go with another."""


class FrozenDict(dict[_Key, _Value]):
    """A dict that can't be changed, for what is frozen and hashed."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "this is a part of frozen settings; make others with msgspec.structs.replace"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def _hashable(value: Any) -> Any:
    """Something with a hash that is the same for equal values."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value


def _names_in(kind: Any) -> list[str]:
    """Those that a setting of this type may be, or be made of."""
    if get_origin(kind) is Literal:
        return [repr(name) for name in get_args(kind)]
    return [name for part in get_args(kind) for name in _names_in(part)]
