"""Work that somebody else may end, and say why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from ....config import NanoInferenceError


class Endings:
    """What is under way and may be ended, in the order in which it began."""

    def __init__(self) -> None:
        self._open: dict[anyio.CancelScope, Callable[[], bool]] = {}
        self._reasons: dict[anyio.CancelScope, NanoInferenceError] = {}
        self._closed: NanoInferenceError | None = None

    def __len__(self) -> int:
        """What has not been ended yet."""
        return len(self._open)

    @contextmanager
    def open(self, rests: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Holds work that may be ended.

        Args:
            rests: Whether it may give way to other work.

        Raises:
            NanoInferenceError: It was.
        """
        if self._closed is not None:
            raise self._closed
        scope = anyio.CancelScope()
        self._open[scope] = rests
        try:
            with scope:
                yield
        finally:
            self._open.pop(scope, None)
            reason = self._reasons.pop(scope, None)
        if reason is not None and scope.cancelled_caught:
            raise reason

    def give_way(self, error: NanoInferenceError) -> bool:
        """Ends what began first of all that rests. Returns whether there was any."""
        found = next((scope for scope, rests in self._open.items() if rests()), None)
        if found is not None:
            self._end(found, error)
        return found is not None

    def close(self, error: NanoInferenceError) -> None:
        """Ends all there is, and whatever would begin from now on."""
        self._closed = error
        for scope in list(self._open):
            self._end(scope, error)

    def _end(self, scope: anyio.CancelScope, error: NanoInferenceError) -> None:
        del self._open[scope]
        self._reasons[scope] = error
        scope.cancel()
