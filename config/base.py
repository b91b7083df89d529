"""Base classes of the settings."""

from __future__ import annotations

import math
import os
import sys
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from .errors import ConfigError

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Range(NamedTuple):
    """The accepted values of a number.

    Attributes:
        wanted: The range in words, for errors.
        low, high: Both ends are included.
        also: A value outside the range that is accepted too.
    """

    wanted: str
    low: float = -math.inf
    high: float = math.inf
    also: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether a value is accepted. NaN never is."""
        return value == self.also or self.low <= value <= self.high


TINY, HUGE = math.ulp(0.0), sys.float_info.max
"""The least number above 0, and the largest finite one."""

PositiveInt = Annotated[int, Range("at least 1", 1)]
NonNegativeInt = Annotated[int, Range("at least 0", 0)]
Seconds = Annotated[float, Range("above 0, at most 86400 (a day)", TINY, 86_400)]
Port = Annotated[int, Range("a port, or 0", 0, 65_535)]


class SettingsMeta(msgspec.StructMeta):
    """Names what a caller means by an argument of another engine, or with a slip in it."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*args, **fields)
        except TypeError as error:
            from .other_names import unknown_argument

            other = unknown_argument(cls.__name__, fields, cls.__struct_fields__)
            raise other or error from None

    @property
    def __signature__(cls) -> Any:
        from .other_names import plain_signature

        return plain_signature(cls, super().__signature__)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, metaclass=SettingsMeta):
    """Base of all settings: immutable, and strict about fields and types.

    Values of the settings in `SECRETS` are never shown.
    """

    SECTION: ClassVar[str] = ""
    SECRETS: ClassVar[frozenset[str]] = frozenset()

    def require(self, name: str, holds: bool, wanted: str) -> None:
        """Raise ConfigError naming the setting unless `holds`."""
        if not holds:
            shown = f"{self.SECTION}.{name}" if self.SECTION else name
            raise ConfigError(f"{shown} is {self._shown(name)!r}; it must be {wanted}")

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The fields that differ from their defaults, for `repr` and tracebacks with values."""
        fields = _fields_of(type(self))
        values = ((each, getattr(self, each.name)) for each in fields)
        return [(each.name, self._shown(each.name)) for each, value in values if _says(each, value)]

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({', '.join(fields)})"

    def __hash__(self) -> int:
        """Hash of the values, including dicts and lists, which have none themselves."""
        return hash(tuple(_hashable(getattr(self, name)) for name in self.__struct_fields__))

    def _shown(self, name: str) -> Any:
        value = getattr(self, name)
        return "***" if value and name in self.SECRETS else value


class Section(Settings, frozen=True):
    """Settings whose values are checked when built, from Python too.

    A `Range` in a setting's annotation is checked after all types; null is in every range.
    """

    def __post_init__(self) -> None:
        """Raise ConfigError naming the first setting of a wrong type or out of range.

        A list is accepted for a tuple, and a path for its text.
        """
        for field in _fields_of(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, os.PathLike):
                value = os.fspath(value)
            try:
                value = msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                shown = f"{self.SECTION}.{field.name}" if self.SECTION else field.name
                from .wrong_values import told_of

                names = ", ".join(_names_in(field.type))
                raise ConfigError(told_of(error, shown, values=names)) from None
            msgspec.structs.force_setattr(self, field.name, value)
            if isinstance(value, int | float):
                for range in get_args(field.type)[1:]:
                    if isinstance(range, Range):
                        self.require(field.name, range.holds(value), range.wanted)
        self.check()

    def check(self) -> None:
        """Raise ConfigError if a setting is out of range or conflicts with another."""


def _says(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    """Return whether a value differs from the field's default."""
    made = field.default_factory is not msgspec.NODEFAULT
    default = field.default_factory() if made else field.default
    return value is not default and bool(value != default)


@cache
def _fields_of(section: type[Settings]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """msgspec evaluates all annotations anew at each call, which takes a millisecond."""
    return msgspec.structs.fields(section)


class FrozenDict(dict[_Key, _Value]):
    """An immutable, hashable dict."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError(
            "this is a part of frozen settings; make others with msgspec.structs.replace"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def _hashable(value: Any) -> Any:
    """Convert to a value whose hash is equal for equal values."""
    if isinstance(value, dict):
        return frozenset((name, _hashable(each)) for name, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value


def _names_in(kind: Any) -> list[str]:
    """Return the names in a type: its Literals, and those of its arguments."""
    if get_origin(kind) is Literal:
        return [repr(name) for name in get_args(kind)]
    return [name for part in get_args(kind) for name in _names_in(part)]
