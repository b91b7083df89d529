"""The policy as a gateway holds it: its document, the block list made of it, tenants' weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from ...config import NanoInferenceError, RequestError
from ...config.logger import get_logger
from ...pipeline.client import BusClient
from .backend import PolicyBackend, PolicyUnavailable, StoredPolicy
from .block_list import BlockList
from .document import Guardrails, PolicyDocument

_ATTEMPTS = 100
"""Attempts of a change that others overtake."""

_WEIGHTS_PERIOD_S = 5.0


class PolicyStore:
    """The document of a backend, read periodically, so that a call needn't wait for it.

    While the backend can't be reached, the last document holds.
    """

    def __init__(
        self, backend: PolicyBackend, refresh_s: float = 1.0, *, needs_keys: bool = True
    ) -> None:
        """Args: the backend; the period of `run_forever`; whether no other credential is taken."""
        self._backend = backend
        self._refresh_s = refresh_s
        self._stored: StoredPolicy | None = None
        self._failed = ""
        self._needs_keys, self._lacks_keys = needs_keys, False
        self._changes = anyio.Lock()

    async def document(self) -> PolicyDocument:
        """Return the current document.

        Raises:
            PolicyUnavailable: It was never read, and can't be.
        """
        if self._stored is None:
            try:
                await self.refresh()
            except NanoInferenceError as error:
                raise PolicyUnavailable(
                    "the keys can't be read, so every call is refused; try again later",
                    detail=f"the keys can't be read, so every call is refused: {error}",
                ) from None
        assert self._stored is not None, "a backend gives a document for no known version"
        return self._stored.document

    @property
    def at_hand(self) -> PolicyDocument | None:
        """The document that was read last; None if none was."""
        return None if self._stored is None else self._stored.document

    async def refresh(self) -> None:
        """Read the document if it has changed. Raises NanoInferenceError if that fails."""
        known = self._stored.version if self._stored else "?"
        if (found := await self._backend.read(known)) is not None:
            self._stored = found

    async def change(self, edit: Callable[[PolicyDocument], PolicyDocument]) -> PolicyDocument:
        """Replace the document atomically; concurrent changes are never lost.

        Args:
            edit: Called again after a concurrent change. An exception changes nothing.

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
        """Refresh periodically."""
        while True:
            try:
                await self.refresh()
                self._failed = ""
                self._warn_without_keys()
            except NanoInferenceError as error:
                if str(error) != self._failed:
                    get_logger().error("policy_not_read", error=str(error))
                self._failed = str(error)
            await anyio.sleep(self._refresh_s)

    def _warn_without_keys(self) -> None:
        """Log once that every call is refused until there is a key."""
        lacks = self._needs_keys and self.at_hand is not None and not self.at_hand.keys
        if lacks and not self._lacks_keys:
            get_logger().warning(
                "no_api_keys",
                brief="no call is taken until there is a key; make the first by `nano-inference "
                "admin keys create root --scope admin` with this process's --config, or its --bus "
                "and --set policy.backend",
            )
        self._lacks_keys = lacks

    async def aclose(self) -> None:
        """Close the backend."""
        await self._backend.aclose()


class BlockLists:
    """The policy's block list, compiled again after a change."""

    def __init__(self, store: PolicyStore, max_match: int) -> None:
        self._store = store
        self._max_match = max_match
        self._made_of = Guardrails()
        self._made = BlockList((), (), max_match)
        self._making = anyio.Lock()

    async def get(self) -> BlockList:
        """Return the current block list. Raises PolicyUnavailable if it is unknown or invalid."""
        guardrails = (await self._store.document()).guardrails
        if guardrails is self._made_of:
            return self._made
        async with self._making:
            if guardrails != self._made_of:
                try:
                    self._made = await block_list_of(guardrails, self._max_match)
                except RequestError as error:
                    # Only a document that wasn't written by `Administration` is invalid.
                    raise PolicyUnavailable(
                        "the block list is invalid, so every call is refused; try again later",
                        detail=f"the block list is invalid, so every call is refused: {error}",
                    ) from None
            self._made_of = guardrails
            return self._made


async def block_list_of(guardrails: Guardrails, max_match: int) -> BlockList:
    """Compile a block list in a thread, since it may be long.

    Raises:
        RequestError: invalid_guardrails.
    """
    make = partial(BlockList, guardrails.literals, guardrails.patterns, max_match)
    return await anyio.to_thread.run_sync(make, limiter=anyio.CapacityLimiter(1))


async def apply_weights_forever(
    clients: Callable[[], Iterable[BusClient]], store: PolicyStore
) -> None:
    """Set the tenants' weights in the fairness of every lane, also of a lane that restarts.

    Args:
        engines: Returns the clients of the lanes.
    """
    # Tenants whose weight was set, so that a removed one is taken back.
    applied: set[str] = set()
    while True:
        try:
            tenants = (await store.document()).tenants.items()
            wanted = {name: each.weight for name, each in tenants if each.weight is not None}
            gone = applied - set(wanted)
            if wanted or gone:
                for client in list(clients()):
                    for lane, config in (await client.deployment.fairness()).items():
                        own = config.tenant_weights
                        kept = {name: each for name, each in own.items() if name not in gone}
                        if (weights := kept | wanted) != own:
                            changed = msgspec.structs.replace(config, tenant_weights=weights)
                            await client.update_fairness(changed, lane)
                applied = set(wanted)
        except NanoInferenceError as error:
            get_logger().debug("tenant_weights_not_set", error=error.message)
        await anyio.sleep(_WEIGHTS_PERIOD_S)
