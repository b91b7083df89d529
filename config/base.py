"""What every section of the settings is."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from .errors import ConfigError


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all settings: immutable, and strict about what it is given."""

    SECTION: ClassVar[str] = ""

    def require(self, name: str, holds: bool, wanted: str) -> None:
        """Raises ConfigError naming the setting unless `holds`."""
        if not holds:
            shown = f"{self.SECTION}.{name}" if self.SECTION else name
            raise ConfigError(f"{shown} is {getattr(self, name)!r}; it must be {wanted}")
