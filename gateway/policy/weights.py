"""The shares of tenants, as the fairness of every lane has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import msgspec

from ...config import FairnessConfig, NanoInferenceError
from ...config.logger import get_logger
from ...pipeline.client import BusClient
from .document import PolicyDocument
from .store import PolicyStore

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
