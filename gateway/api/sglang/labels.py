"""SGLang's weight version is any text; ours is a number that only rises."""

from __future__ import annotations

_KEPT = 1000


class VersionLabels:
    """What clients have called the versions that they put in place through this gateway.

    The last thousand names are kept; a version without one is called by its number.
    """

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def of(self, version: int) -> str:
        """What a version is called."""
        return self._labels.get(version, str(version))

    def put(self, version: int, label: str) -> None:
        """Names a version."""
        self._labels.pop(version, None)
        if label != str(version):
            self._labels[version] = label
        while len(self._labels) > _KEPT:
            del self._labels[min(self._labels)]


def number_of(label: str | None, present: int) -> int | None:
    """The version to count from when a label is a number above the present one, else None."""
    if label is None or not (label.isascii() and label.isdecimal()) or len(label) > 18:
        return None
    return int(label) if int(label) > present else None
