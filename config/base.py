"""What every section of the settings is."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from .errors import ConfigError


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

    def _shown(self, name: str) -> Any:
        value = getattr(self, name)
        return "***" if value and name in self.SECRETS else value
