"""The policy as a gateway has it at hand."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from ...config import NanoInferenceError
from ...config.logger import get_logger
from .backend import PolicyBackend, PolicyUnavailable, StoredPolicy
from .document import PolicyDocument

_ATTEMPTS = 100
"""Of a change that others get in the way of."""


class PolicyStore:
    """The document of a backend, read again and again, so that a call need not wait for it.

    While the backend can't be reached, what was read last holds.
    """

    def __init__(self, backend: PolicyBackend, refresh_s: float = 1.0) -> None:
        """`refresh_s`: how often `run_forever` reads it."""
        self._backend = backend
        self._refresh_s = refresh_s
        self._stored: StoredPolicy | None = None
        self._failed = ""
        self._changes = anyio.Lock()

    async def document(self) -> PolicyDocument:
        """What holds now.

        Raises:
            PolicyUnavailable: It was never read, and can't be.
        """
        if self._stored is None:
            try:
                await self.refresh()
            except NanoInferenceError as error:
                raise PolicyUnavailable(
                    f"who may do what can't be read, so nobody may: {error.message}"
                ) from None
        assert self._stored is not None, "a backend gives a document for no known version"
        return self._stored.document

    @property
    def at_hand(self) -> PolicyDocument | None:
        """What was read last, for whoever can't wait; None when nothing was."""
        return None if self._stored is None else self._stored.document

    async def refresh(self) -> None:
        """Reads it if it has changed. Raises NanoInferenceError when it can't be read."""
        known = self._stored.version if self._stored else "?"
        if (found := await self._backend.read(known)) is not None:
            self._stored = found

    async def change(self, edit: Callable[[PolicyDocument], PolicyDocument]) -> PolicyDocument:
        """Puts what `edit` makes of it in its place; others' changes are never lost.

        Args:
            edit: Called again when somebody else was faster. What it raises changes nothing.

        Raises:
            NanoInferenceError: The backend can't be reached, or others change it all the time.
        """
        async with self._changes:
            for _ in range(_ATTEMPTS):
                await self.refresh()
                assert self._stored is not None
                version, document = self._stored
                changed = edit(document)
                if await self._backend.replace(version, changed):
                    await self.refresh()
                    return changed
        raise PolicyUnavailable("others change the policy all the time; try again")

    async def run_forever(self) -> None:
        """Reads it again and again."""
        while True:
            try:
                await self.refresh()
                self._failed = ""
            except NanoInferenceError as error:
                if error.message != self._failed:
                    get_logger().error("policy_not_read", error=error.message)
                self._failed = error.message
            await anyio.sleep(self._refresh_s)

    async def aclose(self) -> None:
        """Closes the backend."""
        await self._backend.aclose()
