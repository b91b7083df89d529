"""TLS with a real server and real handshakes."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import structlog

from nano_inference.config import ConfigError, GatewayConfig
from nano_inference.gateway.server.measures import Measures
from nano_inference.gateway.server.tls import Certificates

from ...certificates import Authority, Issued
from ..fake import FakeEngine
from ..recorded import Recorded
from ..served import Client, Served, post, serve

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def own(authority: Authority) -> Issued:
    return authority.issue("gateway")


def settings(own: Issued, **more: object) -> GatewayConfig:
    files = {"tls_certificate": str(own.certificate), "tls_key": str(own.key)}
    return GatewayConfig(**files, **more)


class TlsServed(Served):
    """A server with TLS, and connections to it."""

    authority: Authority

    def client(self, certificate: Issued | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority.file)
        if certificate is not None:
            context.load_cert_chain(certificate.certificate, certificate.key)
        return context

    async def open(self, first: bytes = HEALTH, certificate: Issued | None = None) -> Client:
        """A connection after its handshake."""
        return await self.connect(first, self.client(certificate))

    async def serial(self) -> int:
        """The serial number of the certificate for a new connection."""
        found = (await self.open(b"")).writer.get_extra_info("peercert")
        return int(found["serialNumber"], 16)

    def refresh(self) -> None:
        self.server.certificates.refresh()

    async def number(self, number: int) -> None:
        """Wait until there are so many connections."""
        await self.until(lambda: len(self.server.connections) == number)


@asynccontextmanager
async def serving(
    authority: Authority, config: GatewayConfig, measures: Measures | None = None
) -> AsyncIterator[TlsServed]:
    async with serve(FakeEngine(), config, measures, TlsServed) as served:
        served.authority = authority
        yield served


async def is_healthy(client: Client) -> bool:
    """Read the answer to `HEALTH`."""
    return (await client.answer())[0] == 200


def copy(issued: Issued, place: Issued) -> None:
    """Replace a certificate, as renewal tools do: each file atomically."""
    for source, target in ((issued.key, place.key), (issued.certificate, place.certificate)):
        fresh = target.with_suffix(".new")
        fresh.write_bytes(source.read_bytes())
        fresh.rename(target)


async def test_calls_are_answered(authority: Authority, own: Issued) -> None:
    """Several calls on one connection, one larger than a decrypted record."""
    async with serving(authority, settings(own)) as served:
        body = json.dumps({"text": "a" * 500_000, "stream": True}).encode()
        client = await served.open(post(len(body), body))
        assert (await client.answer())[0] == 200
        assert b"[DONE]" in await client.reader.readuntil(b"0\r\n\r\n")
        client.send(HEALTH)
        assert await is_healthy(client)
        # The server ends while it waits for another.


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_supported_tls_versions(
    authority: Authority, own: Issued, version: ssl.TLSVersion
) -> None:
    async with serving(authority, settings(own)) as served:
        context = served.client()
        context.minimum_version = context.maximum_version = version
        client = await served.connect(HEALTH, context)
        spoken = client.writer.get_extra_info("ssl_object").version()
        assert spoken == version.name.replace("_", ".")
        assert await is_healthy(client)


def test_older_tls_versions_are_refused(own: Issued) -> None:
    assert Certificates(settings(own)).context.minimum_version is ssl.TLSVersion.TLSv1_2


# --- certificates of clients ---------------------------------------------------------------------


async def test_client_certificates_are_required(
    tmp_path: Path, own: Issued, authority: Authority
) -> None:
    recorded = Recorded()
    strangers = Authority(tmp_path / "strangers")
    config = settings(own, tls_client_ca=str(authority.file))
    async with serving(authority, config, recorded.measures) as served:
        assert await is_healthy(await served.open(certificate=authority.issue("trainer")))
        for wrong in (None, strangers.issue("trainer")):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                # The client finishes the handshake before the server has verified its certificate.
                client = await served.open(certificate=wrong)
                raise await client.reader.read() or ConnectionResetError
        await served.number(1)
    assert recorded.refused() == {"handshake_failed": 2}


# --- files that change ---------------------------------------------------------------------------


async def test_a_new_certificate_is_for_new_connections(authority: Authority, own: Issued) -> None:
    async with serving(authority, settings(own)) as served:
        before = await served.serial()
        client = await served.open(b"")
        copy(authority.issue("renewed"), own)
        served.refresh()
        assert await served.serial() != before
        client.send(HEALTH)
        assert await is_healthy(client)


async def test_invalid_files_are_logged_and_ignored(authority: Authority, own: Issued) -> None:
    """A key that has come before its certificate, a certificate that is none, and none at all."""
    async with serving(authority, settings(own)) as served:
        before = await served.serial()
        renewed = authority.issue("renewed")
        for break_it, reason in (
            (lambda: own.key.write_bytes(renewed.key.read_bytes()), "KEY_VALUES_MISMATCH"),
            (lambda: own.certificate.write_text("soon"), "not certificates"),
            (own.certificate.unlink, "No such file"),
        ):
            break_it()
            with structlog.testing.capture_logs() as lines:
                served.refresh()
                served.refresh()
            (line,) = lines
            assert line["event"] == "tls_certificate_refused"
            assert reason in line["error"]
            assert await served.serial() == before
        copy(renewed, own)
        served.refresh()
        assert await served.serial() != before


async def test_files_are_refreshed_periodically(authority: Authority, own: Issued) -> None:
    async with serving(authority, settings(own)) as served:
        before = await served.serial()
        copy(authority.issue("renewed"), own)
        while await served.serial() == before:
            pass


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda own: own.key.unlink(), "No such file"),
        (lambda own: own.certificate.write_text(""), "not certificates and keys in PEM"),
        (lambda own: own.key.write_text("s3cret"), "not certificates and keys in PEM"),
        (lambda own: own.certificate.write_bytes(own.key.read_bytes()), "not certificates"),
    ],
)
async def test_invalid_files_are_refused_at_start(
    own: Issued, spoil: Callable[[Issued], object], words: str
) -> None:
    spoil(own)
    with pytest.raises(ConfigError, match=words) as caught:
        Certificates(settings(own))
    assert "s3cret" not in caught.value.message


def test_a_key_with_a_passphrase_is_refused(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="a passphrase"):
        Certificates(settings(authority.issue("locked", passphrase=b"s3cret")))


# --- handshakes ----------------------------------------------------------------------------------


async def test_a_silent_handshake_times_out(authority: Authority, own: Issued) -> None:
    recorded = Recorded()
    async with serving(authority, settings(own), recorded.measures) as served:
        client = await served.connect()
        await served.number(1)
        served.pass_s(14)
        assert recorded.refused() == {}
        served.pass_s(1)
        assert await client.reader.read() == b""
    assert recorded.refused() == {"slow_head": 1}


async def test_handshakes_are_replaced_by_newcomers(
    authority: Authority, own: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.gateway.server.limits.ACCEPTED_AT_ONCE", 1)
    recorded = Recorded()
    async with serving(authority, settings(own, max_connections=1), recorded.measures) as served:
        silent = [await served.connect() for _ in range(3)]
        await served.number(3)
        client = await served.open()
        assert await silent[0].reader.read() == b""
        assert await is_healthy(client)
        await served.number(3)
        assert recorded.refused() == {"replaced": 1}


async def test_broken_handshakes_leave_no_connection(
    authority: Authority, own: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    """At any byte of the ClientHello, with an abort or an end, and with garbage after it."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=authority.file)
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1").do_handshake()
    hello = outgoing.read()
    recorded = Recorded()
    async with serving(authority, settings(own), recorded.measures) as served:
        broken = 0
        for cut in range(1, len(hello) + 1, 7):
            for rest in (b"", bytes(range(256)), hello):
                client = await served.connect(hello[:cut] + rest)
                if cut % 2:
                    await client.writer.drain()
                    client.abort()
                else:
                    client.writer.write_eof()
                    with suppress(ConnectionError):
                        await client.reader.read()
                broken += 1
        assert await is_healthy(await served.open())
        await served.number(1)
        assert recorded.refused() == {"handshake_failed": broken}
    assert not caplog.records


async def test_plain_http_is_counted(authority: Authority, own: Issued) -> None:
    recorded = Recorded()
    async with serving(authority, settings(own), recorded.measures) as served:
        assert b"HTTP" not in await (await served.connect(HEALTH)).reader.read()
    assert recorded.refused() == {"handshake_failed": 1}


async def test_a_refusal_is_read_before_the_end(authority: Authority, own: Issued) -> None:
    """Of a connection that is ended with an answer of its own."""
    recorded = Recorded()
    async with serving(authority, settings(own), recorded.measures) as served:
        assert await (await served.open(b"nothing of HTTP\r\n\r\n")).code() == (400, "malformed")
        served.pass_s(2)
        await served.number(0)
    assert recorded.refused() == {"malformed": 1}
