"""Work that somebody else may end, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from ...config import NanoInferenceError


class Endings:
    """What is under way and may be ended, in the order in which it began."""

    def __init__(self) -> None:
        self._open: dict[anyio.CancelScope, None] = {}
        self._reasons: dict[anyio.CancelScope, NanoInferenceError] = {}
        self._closed: NanoInferenceError | None = None

    def __len__(self) -> int:
        """What has not been ended yet."""
        return len(self._open)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Holds work that may be ended.

        Raises:
            NanoInferenceError: It was.
        """
        if self._closed is not None:
            raise self._closed
        scope = anyio.CancelScope()
        self._open[scope] = None
        try:
            with scope:
                yield
        finally:
            self._open.pop(scope, None)
            reason = self._reasons.pop(scope, None)
        if reason is not None and scope.cancelled_caught:
            raise reason

    def end_oldest(self, error: NanoInferenceError) -> None:
        """Ends what began first."""
        scope = next(iter(self._open))
        del self._open[scope]
        self._reasons[scope] = error
        scope.cancel()

    def close(self, error: NanoInferenceError) -> None:
        """Ends all there is, and whatever would begin from now on."""
        self._closed = error
        while self._open:
            self.end_oldest(error)
