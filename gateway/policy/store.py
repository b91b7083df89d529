"""The policy as a gateway has it at hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from ...config import FairnessConfig, NanoInferenceError, RequestError
from ...config.logger import get_logger
from ...pipeline.client import BusClient
from .backend import PolicyBackend, PolicyUnavailable, StoredPolicy
from .block_list import BlockList
from .document import Guardrails, PolicyDocument

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


class BlockLists:
    """The block list as the policy has it now. It is made anew when that has changed."""

    def __init__(self, read: Callable[[], Awaitable[Guardrails]], max_match: int) -> None:
        self._read = read
        self._max_match = max_match
        self._made_of = Guardrails()
        self._made = BlockList((), (), max_match)
        self._making = anyio.Lock()

    async def get(self) -> BlockList:
        """Raises PolicyUnavailable when nobody knows what it is."""
        guardrails = await self._read()
        if guardrails is self._made_of:
            return self._made
        async with self._making:
            if guardrails != self._made_of:
                self._made = await self._make(guardrails)
            self._made_of = guardrails
            return self._made

    async def _make(self, guardrails: Guardrails) -> BlockList:
        try:
            return await block_list_of(guardrails, self._max_match)
        except RequestError as error:
            # It came past the administration.
            raise PolicyUnavailable(
                f"the block list can't be read, so nothing is let through: {error.message}"
            ) from None


async def block_list_of(guardrails: Guardrails, max_match: int) -> BlockList:
    """Makes it in a thread, since it may be long.

    Raises:
        RequestError: invalid_guardrails.
    """
    make = partial(BlockList, guardrails.literals, guardrails.patterns, max_match)
    return await anyio.to_thread.run_sync(make)


_PERIOD_S = 5.0


class TenantWeights:
    """Keeps them as the policy says; a lane that starts anew has those of its own settings."""

    def __init__(self, engines: Callable[[], Iterable[BusClient]], store: PolicyStore) -> None:
        """`engines`: gives the clients whose lanes they are to be in."""
        self._engines = engines
        self._store = store
        # Of tenants that had one, so that it can be taken back.
        self._set: set[str] = set()

    async def run_forever(self) -> None:
        """Looks again and again whether all lanes have them."""
        while True:
            try:
                await self._apply(await self._store.document())
            except NanoInferenceError as error:
                get_logger().debug("tenant_weights_not_set", error=error.message)
            await anyio.sleep(_PERIOD_S)

    async def _apply(self, document: PolicyDocument) -> None:
        wanted = {
            tenant: each.weight
            for tenant, each in document.tenants.items()
            if each.weight is not None
        }
        gone = self._set - set(wanted)
        if not (wanted or gone):
            return
        for engine in list(self._engines()):
            for lane, config in (await engine.fairness()).items():
                own = config.tenant_weights
                kept = {name: each for name, each in own.items() if name not in gone}
                if (weights := kept | wanted) != own:
                    changed: FairnessConfig = msgspec.structs.replace(
                        config, tenant_weights=weights
                    )
                    await engine.update_fairness(changed, lane)
        self._set = set(wanted)
