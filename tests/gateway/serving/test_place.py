"""Addresses of a gateway: a public one needs keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import structlog

from nano_inference.config import ConfigError, load_config
from nano_inference.gateway.gateway import Gateway, _is_own
from nano_inference.gateway.server.connections import Connection
from nano_inference.pipeline.client import BusClient

from ...certificates import Authority
from ..fake import FakeEngine

EVERYWHERE = {"gateway.host": "0.0.0.0"}
WITH_OIDC = {"policy.oidc_issuer": "https://issuer.example", "policy.oidc_audience": "a"}


async def warnings_of(settings: dict[str, Any]) -> list[str]:
    """The warnings of a gateway with these settings."""
    config = load_config(env={}, overrides=settings)
    with structlog.testing.capture_logs() as lines:
        async with Gateway(cast(BusClient, FakeEngine()), config) as gateway:
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.close()
            await gateway._app.policy.open()
    return [line["event"] for line in lines if line["log_level"] == "warning"]


async def test_a_public_address_needs_keys() -> None:
    with pytest.raises(ConfigError, match="without keys whoever reaches it"):
        await warnings_of(EVERYWHERE)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
async def test_a_loopback_address_needs_no_keys(host: str) -> None:
    config = load_config(env={}, overrides={"gateway.host": host})
    async with Gateway(cast(BusClient, FakeEngine()), config) as gateway:
        assert gateway.url == f"http://{host}:{gateway.port}"


async def test_an_insecure_gateway_is_logged_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nano_inference.gateway.gateway._WARN_S", 0.0)
    said = await warnings_of(EVERYWHERE | {"gateway.insecure": True})
    assert len(said) > 1
    assert set(said) == {"gateway_insecure"}


@pytest.mark.parametrize("keys", [{"policy.backend": "bus"}, WITH_OIDC])
async def test_keys_without_tls_are_logged(tmp_path: Path, keys: dict[str, str]) -> None:
    none = {"no_api_keys"} if "policy.backend" in keys else set()
    assert set(await warnings_of(EVERYWHERE | keys)) == {"gateway_without_tls", *none}
    own = Authority(tmp_path).issue("gateway")
    tls = {"gateway.tls_certificate": str(own.certificate), "gateway.tls_key": str(own.key)}
    assert set(await warnings_of(EVERYWHERE | keys | tls)) == none


@pytest.mark.parametrize(("keys", "client"), [({}, b"gold"), (WITH_OIDC, b"127.0.0.1")])
async def test_with_keys_the_tenant_header_gives_no_turn(
    keys: dict[str, str], client: bytes
) -> None:
    config = load_config(env={}, overrides=keys)
    async with Gateway(cast(BusClient, FakeEngine()), config) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Tenant: gold\r\n\r\n")
        assert b" 200 " in await reader.readline()
        (connection,) = gateway._server.connections._all
        assert isinstance(connection, Connection)
        assert connection._client == client
        writer.close()


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("::", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback_addresses(address: str, own: bool) -> None:
    assert _is_own(address) is own
