"""Adapters that are loaded when a call names them: subfolders of `gateway.adapter_folder`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from ...config import AdapterError, is_adapter_id
from ...pipeline.client import BusClient
from ...store.loaded_adapter import LoadedAdapter

_ADAPTER_FILE = "adapter_config.json"


class Served(Protocol):
    """The adapters that requests may name: a `ServedModels`."""

    async def adapters(self) -> tuple[LoadedAdapter, ...]: ...

    async def wait_for(self, id: str, *, loaded: bool) -> None: ...


class AdapterFolders:
    """Loads the adapter in a subfolder when a call names it.

    When no more adapters fit, the one of these subfolders that was used longest ago is unloaded.
    """

    def __init__(self, client: BusClient, folder: str) -> None:
        self._client = client
        self._folder = Path(folder).expanduser().absolute()
        self._loading = anyio.Lock()
        self._reading = anyio.CapacityLimiter(1)
        # Names in the order of their last use at this gateway.
        self._used: dict[str, None] = {}

    def note(self, name: str) -> None:
        """Note that a call uses a loaded adapter."""
        if name in self._used:
            del self._used[name]
            self._used[name] = None

    async def load(self, name: str, served: Served) -> bool:
        """Load an adapter; return False if no subfolder has it.

        Raises:
            AdapterError: It can't be loaded.
        """
        # A name is one component of a path, and begins with a letter or digit.
        if not is_adapter_id(name) or "/" in name:
            return False
        folder = self._folder / name
        is_file = (folder / _ADAPTER_FILE).is_file
        if not await anyio.to_thread.run_sync(is_file, limiter=self._reading):
            return False
        async with self._loading:
            loaded = await served.adapters()
            if name not in [each.id for each in loaded]:
                await self._load(name, str(folder), loaded)
                await served.wait_for(name, loaded=True)
            self._used[name] = None
        return True

    async def _load(self, name: str, folder: str, loaded: Sequence[LoadedAdapter]) -> None:
        own = [each.id for each in loaded if Path(each.folder).parent == self._folder]
        # Those that this gateway hasn't used come first.
        ages = {each: age for age, each in enumerate(self._used)}
        old = sorted(own, key=lambda each: ages.get(each, -1))
        while True:
            try:
                await self._client.load_adapter(name, folder)
                return
            except AdapterError as error:
                if error.code != "adapter_limit" or not old:
                    raise
            oldest = old.pop(0)
            self._used.pop(oldest, None)
            await self._client.unload_adapter(oldest)
