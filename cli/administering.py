"""Whom `admin` commands talk to: a server, or the place where a policy is kept."""

from __future__ import annotations

import getpass
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from ..config import ConfigError, PolicyConfig
from .answerer import server_of
from .connection import connected
from .http_calls import HttpCalls
from .options import Options

Shown = dict[str, Any]
"""As JSON shows it."""

Changed = Callable[[str, str, Shown], None]
"""Told of a change; see that of `Administration`."""


class Administers(Protocol):
    """Changes who may do what; see `Administration`, which is one."""

    async def keys(self) -> list[Shown]: ...

    async def create_key(self, body: Shown) -> Shown: ...

    async def change_key(self, key_id: str, body: Shown) -> Shown: ...

    async def revoke_key(self, key_id: str) -> None: ...

    async def tenants(self) -> dict[str, Shown]: ...

    async def set_tenant(self, tenant: str, body: Shown) -> Shown: ...

    async def remove_tenant(self, tenant: str) -> None: ...

    async def guardrails(self) -> Shown: ...

    async def set_guardrails(self, body: Shown) -> Shown: ...


@asynccontextmanager
async def administering(options: Options) -> AsyncIterator[Administers]:
    """The server of --url, or the backend that `policy.backend` names.

    Raises:
        NanoInferenceError: It can't be reached, or there is none.
    """
    if options.url is not None:
        options.client_config()
        async with HttpAdministration(server_of(options)) as server:
            yield server
        return
    # They take longer to load than all else of a command.
    from ..gateway.policy.administration import Administration
    from ..gateway.policy.backend import open_backend
    from ..gateway.policy.store import PolicyStore

    config = options.client_config()
    if config.policy.backend == "off":
        raise ConfigError(
            "policy.backend is 'off', so there are no keys; set it to 'bus' or 'file', here and "
            "for the gateway, or name a server with --url"
        )
    with _audited(config.policy) as changed:
        if config.policy.backend == "bus":
            async with connected(config) as client:
                backend = open_backend(config.policy, client.bus.store.policy)
                yield Administration(PolicyStore(backend), changed)
            return
        store = PolicyStore(open_backend(config.policy, None))
        try:
            yield Administration(store, changed)
        finally:
            await store.aclose()


@contextmanager
def _audited(config: PolicyConfig) -> Iterator[Changed]:
    """Tells the audit log, where there is one, of changes that no key allowed."""
    if not config.audit_file:
        yield lambda what, of, now: None
        return
    from ..gateway.policy.audit import AuditLog

    log = AuditLog(config)
    log.open()
    by = {"by": "command line", "user": getpass.getuser()}
    try:
        yield lambda what, of, now: log.write(what, by | {"changed": of, "now": now})
    finally:
        log.close()


class HttpAdministration(HttpCalls):
    """The same over a server's `/admin`."""

    async def keys(self) -> list[Shown]:
        data: list[Shown] = (await self._call("GET", "keys"))["data"]
        return data

    async def create_key(self, body: Shown) -> Shown:
        return await self._call("POST", "keys", body)

    async def change_key(self, key_id: str, body: Shown) -> Shown:
        return await self._call("PATCH", f"keys/{quote(key_id, safe='')}", body)

    async def revoke_key(self, key_id: str) -> None:
        await self._call("DELETE", f"keys/{quote(key_id, safe='')}")

    async def tenants(self) -> dict[str, Shown]:
        return await self._call("GET", "tenants")

    async def set_tenant(self, tenant: str, body: Shown) -> Shown:
        return await self._call("PUT", f"tenants/{quote(tenant)}", body)

    async def remove_tenant(self, tenant: str) -> None:
        await self._call("DELETE", f"tenants/{quote(tenant)}")

    async def guardrails(self) -> Shown:
        return await self._call("GET", "guardrails")

    async def set_guardrails(self, body: Shown) -> Shown:
        return await self._call("PUT", "guardrails", body)

    async def _call(self, method: str, path: str, body: Any = None) -> Shown:
        async with self.answer(method, f"{self.root}/admin/{path}", body) as response:
            return msgspec.json.decode(await response.aread(), type=Shown)
