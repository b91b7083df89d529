"""The bus over TLS (`rediss`), to a real server.

The embedded Valkey speaks none, so a program before it does; a server that does itself is asked
itself (`--redis-server /usr/bin/redis-server`).
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

import pytest

from nano_inference import BusClient
from nano_inference.config import BusConfig, load_config
from nano_inference.pipeline.pipeline import Pipeline

from ..buses import kit
from ..certificates import Authority, Issued
from ..pipeline import short_model
from ..rig import load
from ..servers import Node, valkey

LIMIT_S = 60
GREEDY = {"prompt": "98 + 25 =", "sampling": {"temperature": 0}}


class Front:
    """Speaks TLS for a server that does not."""

    def __init__(self, context: ssl.SSLContext, behind: int) -> None:
        self._context, self._behind = context, behind
        self._writers: set[asyncio.StreamWriter] = set()
        self.met = 0

    async def start(self, port: int) -> asyncio.Server:
        return await asyncio.start_server(self._join, "127.0.0.1", port, ssl=self._context)

    def drop_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met += 1
        others, other = await asyncio.open_connection("127.0.0.1", self._behind)
        self._writers |= {writer, other}
        await asyncio.gather(_copy(reader, other), _copy(others, writer))
        self._writers -= {writer, other}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class Place:
    """A server with TLS."""

    def __init__(self, authority: Authority, port: int, node: Node, front: Front | None) -> None:
        self.authority, self.port, self.node, self._front = authority, port, node, front

    def url(self, host: str = "127.0.0.1", user: str = "", **options: object) -> str:
        given = {"ssl_ca_certs": str(self.authority.file)} | options
        return f"rediss://{user}{host}:{self.port}/0?{urlencode(given)}"

    def config(self, url: str) -> BusConfig:
        return BusConfig(url=url, prefix="test-tls")

    async def drop_all(self) -> None:
        """Every connection with TLS, as when the server's process is replaced."""
        if self._front is not None:
            self._front.drop_all()
        else:
            await self.node.plain.execute_command("CLIENT KILL TYPE normal SKIPME yes")


def speaks_tls(program: str) -> bool:
    """A program built without TLS ends at once, and says why."""
    command = [program, "--port", "0", "--tls-port", "1", "--bind", "256.0.0.0", "--save", ""]
    told = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    return b"Failed finding TLS support" not in told.stdout


@asynccontextmanager
async def place(
    folder: Path, program: str, own: Issued, authority: Authority, clients: bool = False
) -> AsyncIterator[Place]:
    port: int = load("chaos_rig").free_port()
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        options: list[str] = []
        if itself := speaks_tls(program):
            files = {"cert": own.certificate, "key": own.key, "ca-cert": authority.file}
            for name, file in files.items():
                options += [f"--tls-{name}-file", str(file)]
            options += ["--tls-port", str(port), "--tls-auth-clients", "yes" if clients else "no"]
        node = Node(program, folder / "server", *options)
        stack.push_async_callback(node.aclose)
        await node.start()
        front = None
        if not itself:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
            context.load_cert_chain(own.certificate, own.key)
            if clients:
                context.verify_mode = ssl.CERT_REQUIRED
            front = Front(context, node.port)
            accepting = await front.start(port)
            stack.callback(front.drop_all)
            stack.callback(accepting.close)
        yield Place(authority, port, node, front)


@pytest.fixture
def program(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--redis-server") or valkey())


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


async def test_a_pipeline_serves_over_tls(
    tmp_path: Path, program: str, authority: Authority
) -> None:
    """With a user that has a password, and all connections cut in the middle."""
    async with place(tmp_path, program, authority.issue("redis"), authority) as redis:
        await redis.node.plain.execute_command("ACL SETUSER me on >s3cret ~* &* +@all")
        await redis.node.plain.execute_command("ACL SETUSER default off")
        url = redis.url(user="me:s3cret@")
        config = load_config(
            env={},
            overrides={
                "bus.url": url,
                "bus.prefix": "test-tls",
                "bus.links": "redis",
                "engine.dtype": "float32",
                "engine.model_path": str(short_model.folder()),
                "telemetry.log_level": "error",
            },
        )
        async with Pipeline(config), BusClient.connect(redis.config(url)) as client:
            assert (await client.complete(GREEDY)).status == "done"
            long = {**GREEDY, "sampling": {"max_tokens": 200, "ignore_eos": True}}
            async with aclosing(client.submit(long)) as outputs:
                await anext(outputs)
                await redis.drop_all()
                async for output in outputs:
                    last = output
            assert last.status == "done"
            assert last.usage.completion_tokens == 200


async def refusal(place: Place, url: str) -> str:
    """Why nobody can talk to it so."""
    message = await kit.ping_error(place.config(url))
    assert "s3cret" not in message
    return message


async def test_only_the_intended_server_gets_the_password(
    tmp_path: Path, program: str, authority: Authority
) -> None:
    """A certificate of somebody else, or for another name; and nothing is said to a stranger."""
    strangers = Authority(tmp_path / "strangers")
    async with place(tmp_path, program, authority.issue("redis"), authority) as redis:
        me = "me:s3cret@"
        said = await refusal(redis, redis.url(user=me, ssl_ca_certs=str(strangers.file)))
        assert "certificate verify failed" in said
        # The machine's own authorities, where none are named.
        said = await refusal(redis, f"rediss://{me}127.0.0.1:{redis.port}/0")
        assert "certificate verify failed" in said

    elsewhere = authority.issue("redis", names=("redis.example",))
    async with place(tmp_path / "elsewhere", program, elsewhere, authority) as redis:
        said = await refusal(redis, redis.url(user=me))
        assert "certificate verify failed: IP address mismatch" in said


async def test_clients_without_tls_are_not_served(
    tmp_path: Path, program: str, authority: Authority
) -> None:
    async with place(tmp_path, program, authority.issue("redis"), authority) as redis:
        plain = f"redis://me:s3cret@127.0.0.1:{redis.port}/0"
        assert "can't reach Redis at" in await refusal(redis, plain)


async def test_a_server_may_ask_for_a_certificate(
    tmp_path: Path, program: str, authority: Authority
) -> None:
    own, mine = authority.issue("redis"), authority.issue("stages")
    async with place(tmp_path, program, own, authority, clients=True) as redis:
        assert "can't reach Redis at" in await refusal(redis, redis.url())
        url = redis.url(ssl_certfile=str(mine.certificate), ssl_keyfile=str(mine.key))
        async with BusClient.connect(redis.config(url)) as client:
            await client.bus.ping()
