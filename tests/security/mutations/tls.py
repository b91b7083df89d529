"""TLS that is crooked somewhere: first words, last words of a handshake, and what comes behind it.

What is done follows from a case's two numbers; the bytes are other ones each time, since keys are.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

from .bodies import usual
from .interfaces import COMPLETIONS
from .playing import Server
from .wire import spoiled

REQUEST = COMPLETIONS.call(usual(COMPLETIONS))

NO_TLS = (
    *(REQUEST, b"GET / HTTP/1.1\r\n\r\n", b"\x00", b"\n" * 400, b"\xff" * 70_000),
    # SSL 2, and the longest that it may say of itself.
    *(
        b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + b"\x01\x00\x80" * 12,
        b"\xff\xff\x01\x00\x02",
    ),
    *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"SSH-2.0-x\r\n", b"PROXY TCP4 1.1.1.1 1.1.1.1 1 1\r\n"),
    # Alerts, a heartbeat that asks for more than it brings, and many words that mean nothing.
    *(b"\x15\x03\x03\x00\x02\x02\x28", b"\x15\x03\x03\x00\x02\x01\x00", b"\x15\x03\x01\x00\x00"),
    *(b"\x18\x03\x02\x00\x03\x01\x40\x00", b"\x14\x03\x03\x00\x01\x01" * 5000),
    *(b"\x16\x03\x01\x00\x00" * 5000, b"\x16\x03\x01\x40\x01" + b"\x01" * 16_385),
    # A first word of sixteen megabytes.
    b"\x16\x03\x01\x40\x00\x01\xff\xff\xff" + b"\x03" * 16_380,
)

NOT_SEALED = (
    *(b"\x17\x03\x03\x00\x05hello", b"\x15\x03\x03\x00\x02\x01\x00", b"\x16\x03\x03\x00\x04" * 9),
    *(b"\x17\x03\x03\x00\x20" + b"\x00" * 32, b"\x14\x03\x03\x00\x01\x01", REQUEST),
)


class Client:
    """One that has its bytes before they are sent.

    Attributes:
        writer: What takes them.
        tls: What makes them.
        connected: Whether the handshake is done.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext
    ) -> None:
        self._reader, self.writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self.connected = False

    def step(self) -> bytes:
        """What it has to say next on the way to a connection; b"" when there is nothing more."""
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
            self.connected = True
        return self._outgoing.read()

    async def listen(self) -> bool:
        """Takes what has come; tells whether anything has before the end."""
        try:
            came = await self._reader.read(1 << 16)
        except ConnectionError:
            return False
        self._incoming.write(came)
        return bool(came)

    async def shake_hands(self) -> None:
        self.writer.write(self.step())
        while not self.connected:
            assert await self.listen()
            self.writer.write(self.step())

    def sealed(self, data: bytes) -> bytes:
        """What says this, encrypted."""
        self.tls.write(data)
        return self._outgoing.read()

    async def answer(self) -> bytes:
        """All that is said until the connection ends."""
        said = b""
        while True:
            try:
                said += self.tls.read(1 << 16)
            except ssl.SSLWantReadError:
                if not await self.listen():
                    break
            except ssl.SSLError:
                break
        return said


def records(raw: bytes) -> list[bytes]:
    """The records that bytes consist of."""
    found = []
    while raw:
        size = 5 + int.from_bytes(raw[3:5], "big")
        found.append(raw[:size])
        raw = raw[size:]
    return found


def crooked(raw: bytes, rng: random.Random) -> bytes:
    """Other bytes than these, but not by much: any of them, or the record's length, or the places
    of a first word that mean most."""
    data = bytearray(raw)
    while bytes(data) == raw:
        for _ in range(rng.randrange(1, 3)):
            match rng.randrange(6):
                case 4 if len(data) > 5:
                    data[3:5] = rng.choice((b"\x00\x00", b"\xff\xff", b"\x40\x01", b"\x00\x01"))
                case 5 if len(data) > 44:
                    data[rng.choice((6, 7, 8, 9, 43, 44))] = rng.choice((0, 1, 127, 255))
                case _:
                    data = bytearray(spoiled(bytes(data), rng))
    return bytes(data)


Kind = Callable[[Client, random.Random], Awaitable[None]]
"""Raises AssertionError when the answer is another one than it must be."""


async def no_tls(client: Client, rng: random.Random) -> None:
    raw = rng.choice((*NO_TLS, rng.randbytes(rng.randrange(1, 600))))
    client.writer.write(raw)


async def bad_hello(client: Client, rng: random.Random) -> None:
    raw = crooked(client.step(), rng)
    cut = rng.randrange(len(raw) + 1)
    client.writer.write(raw[:cut])
    client.writer.write(raw[cut:])


async def bad_finish(client: Client, rng: random.Random) -> None:
    """The server has said its part, and gets another answer than it waits for."""
    client.writer.write(client.step())
    said = b""
    while not said:
        assert await client.listen()
        said = client.step()
    *before, last = records(said)
    client.writer.write(b"".join(before) + crooked(last, rng))


async def bad_record(client: Client, rng: random.Random) -> None:
    """Of a request that is sent in pieces one is not as it was sealed."""
    await client.shake_hands()
    places = sorted(rng.sample(range(1, len(REQUEST)), 3))
    pieces = zip([0, *places], [*places, len(REQUEST)], strict=True)
    sealed = [client.sealed(REQUEST[begin:end]) for begin, end in pieces]
    place = rng.randrange(len(sealed))
    match rng.randrange(5):
        case 0:
            sealed[place] = crooked(sealed[place], rng)
        case 1:
            del sealed[place]
        case 2:
            place = rng.randrange(len(sealed) - 1)
            sealed[place], sealed[place + 1] = sealed[place + 1], sealed[place]
        case 3:
            place = rng.randrange(len(sealed) - 1)
            sealed.insert(place, sealed[place])
        case _:
            sealed.insert(place, rng.choice(NOT_SEALED))
    client.writer.write(b"".join(sealed))


KINDS: tuple[tuple[int, bool, Kind], ...] = (
    (20, False, no_tls),
    (40, False, bad_hello),
    (20, False, bad_finish),
    (55, True, bad_record),
)
"""How often each comes; whether its handshake is a good one; and what it does."""


async def play(server: Server, seed: int, number: int) -> bool:
    """Does a case, and ends it as a client may.

    Returns:
        Whether there was a handshake before that was as it should be.
    """
    rng = random.Random(f"{seed}:{number}")
    ((_, shaken, kind),) = rng.choices(KINDS, [weight for weight, *_ in KINDS])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    version = rng.choice((ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3))
    context.minimum_version = context.maximum_version = version
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = Client(reader, writer, context)
    try:
        await kind(client, rng)
        if rng.random() < 0.2:
            return shaken
        writer.write_eof()
        # To the end, where there is no answer to anything that was not sealed as it must be.
        answer = await client.answer()
        assert not answer, f"case {number} ({kind.__name__}): {answer[:300]!r}"
    except (ConnectionError, ssl.SSLError):
        # What it says of the connection that it closed.
        pass
    finally:
        writer.transport.abort()
    return shaken
