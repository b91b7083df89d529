"""What was found out a moment ago need not be asked again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from ...config import NanoInferenceError

T = TypeVar("T")


class Recent(Generic[T]):
    """The answer to a question, which is asked again when the last answer is old.

    However many ask at a time, the question is asked once: the others wait for that answer.
    """

    def __init__(self, ask: Callable[[], Awaitable[T]], lasts_s: float) -> None:
        """Args: what is asked, and for how long its answer counts, be it an error."""
        self._ask = ask
        self._lasts_s = lasts_s
        self._asking = anyio.Lock()
        self._answers: list[T] = []
        self._error: NanoInferenceError | None = None
        self._until_s = -1.0

    async def get(self) -> T:
        """The answer. Raises what NanoInferenceError asking raised."""
        async with self._asking:
            if anyio.current_time() >= self._until_s:
                self._answers, self._error = [], None
                try:
                    self._answers = [await self._ask()]
                except NanoInferenceError as error:
                    self._error = error
                self._until_s = anyio.current_time() + self._lasts_s
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answers[0]
