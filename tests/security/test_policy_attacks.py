"""Attacks on access control, by name.

A real server and bytes that are written by hand, since clients put straight what is crooked here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import structlog

from nano_inference.config import Config, load_config
from nano_inference.gateway.app import GatewayApp, make_app
from nano_inference.gateway.policy import keys as api_keys
from nano_inference.gateway.policy.administration import Administration
from nano_inference.gateway.policy.oidc import TokenAuthenticator
from nano_inference.gateway.server.server import HttpServer
from nano_inference.telemetry.instruments import HTTP_DURATION

from ..gateway.fake import FakeEngine
from ..gateway.policy.issuer import Issuer, NearKeys
from ..gateway.recorded import Recorded
from ..gateway.served import Client, listening

LIMIT_S = 120
BODY = b'{"text": "a"}'
MAKE_A_KEY = b'{"name": "mine", "scopes": ["admin"]}'


def call(
    target: str = "/generate", *headers: tuple[str, str], method: str = "POST", body: bytes = BODY
) -> bytes:
    """A whole call."""
    about_body = (("Content-Type", "application/json"), ("Content-Length", str(len(body))))
    given = (("Host", "localhost"), *headers, *(about_body if method != "GET" else ()))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in given)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body if method != "GET" else b"")


def bearer(text: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {text}"


class Fort:
    """A gateway that knows its callers by keys and by tokens, and keys of its own.

    Attributes:
        secrets: The texts of keys, by what they are for.
    """

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.told, self.issuer = engine, Recorded(), Issuer()
        self.secrets: dict[str, str] = {}
        self.port = 0
        self._clients: list[Client] = []
        self.config: Config = msgspec.structs.replace(
            load_config(env={}, overrides={"policy.backend": "bus", "gateway.access_log": True}),
            policy=self.issuer.config(backend="bus"),
        )
        self.app: GatewayApp = make_app(engine, self.config, self.told.measures)  # type: ignore[arg-type]
        self.policy = self.app.policy
        near = NearKeys(self.issuer, self.config.policy, lambda: 0.0)
        self.policy._tokens = TokenAuthenticator(self.config.policy, near)
        self.administration = Administration(self.policy.store)
        self.server = HttpServer(self.app, self.config.gateway, self.told.measures)

    async def make_keys(self) -> None:
        for name in ("read", "generate", "weights", "admin", "revoked", "other"):
            scope = name if name in ("read", "weights", "admin") else "generate"
            made = await self.administration.create_key({"name": name, "scopes": [scope]})
            self.secrets[name] = made["key"]
            if name == "revoked":
                await self.administration.revoke_key(made["id"])
        expired = await self.administration.create_key({"name": "expired", "expires_in_s": 1e-9})
        self.secrets["expired"] = expired["key"]

    def bearer(self, name: str) -> tuple[str, str]:
        return bearer(self.secrets[name])

    async def sends(self, data: bytes) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        # asyncio closes connections that nobody holds.
        self._clients.append(client)
        client.send(data)
        return client

    async def answers(self, data: bytes) -> tuple[int, str]:
        """The status and the error's code; "" for none."""
        status, _, body = await (await self.sends(data)).answer()
        try:
            return status, json.loads(body)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return status, ""

    async def names(self) -> set[str]:
        """Return the names of all keys."""
        return {key["name"] for key in await self.administration.keys()}

    @property
    def untouched(self) -> bool:
        """Whether nothing has reached the engine."""
        return not self.engine.requests and not self.engine.names

    def close(self) -> None:
        for client in self._clients:
            client.abort()


@pytest.fixture
async def fort(engine: FakeEngine) -> AsyncIterator[Fort]:
    made = Fort(engine)
    await made.make_keys()
    async with asyncio.timeout(LIMIT_S), listening(made.server) as made.port:
        yield made
        made.close()
    await made.policy.aclose()


# --- without a key, or with none that is good ----------------------------------------------------

MISSING, INVALID = (401, "missing_api_key"), (401, "invalid_api_key")


def with_key(fort: Fort, path: str) -> dict[str, tuple[bytes, tuple[int, str]]]:
    """Return the requests to a path and their expected answers, by the attack."""
    good, other = fort.secrets["generate"], fort.secrets["other"]
    middle = len("ni-") + 12
    kept = fort.policy.store._stored.document.keys[good[3:middle]]

    def by(*headers: tuple[str, str]) -> bytes:
        return call(path, *headers)

    return {
        "no key": (by(), MISSING),
        "an empty key": (by(bearer("")), MISSING),
        "a key that was never made": (by(bearer(f"ni-{'0' * 12}-{'x' * 43}")), INVALID),
        "another secret under a good id": (by(bearer(f"{good[:middle]}-{'x' * 43}")), INVALID),
        "a good secret under another's id": (by(bearer(other[:middle] + good[middle:])), INVALID),
        "a key that is cut": (by(bearer(good[:-1])), INVALID),
        "a key that is longer": (by(bearer(good + "x")), INVALID),
        "a key in capitals": (by(bearer(good.upper())), INVALID),
        "what is kept of a key": (by(bearer(f"ni-{kept.id}-{kept.digest[:43]}")), INVALID),
        "a key that was revoked": (by(fort.bearer("revoked")), INVALID),
        "a key that has expired": (by(fort.bearer("expired")), INVALID),
        "a key in the address": (call(f"{path}?api_key={good}"), INVALID),
        "a key in the address, as a token": (call(f"{path}?access_token={good}"), INVALID),
        "a password": (by(("Authorization", "Basic eDp5")), INVALID),
        "a key of no kind": (by(("Authorization", good)), INVALID),
        "a key in a cookie": (by(("Cookie", f"Authorization=Bearer {good}")), MISSING),
        "a key for the proxy": (by(("Proxy-Authorization", f"Bearer {good}")), MISSING),
        "a key under nearly the name": (by(("api_key", good), ("Authorization_", good)), MISSING),
        "a key in the body": (
            call(path, body=b'{"text": "a", "api_key": "%s"}' % good.encode()),
            MISSING,
        ),
        "letters that no key has": (by(bearer("ni-ü\xff")), INVALID),
        "a giant key": (by(bearer("x" * 60_000)), INVALID),
        "a giant token": (by(bearer("a." * 2 + "x" * 60_000)), INVALID),
        "two keys": (by(bearer(other), bearer(good)), INVALID),
        "two keys in two headers": (by(("api-key", other), bearer(good)), INVALID),
        "two keys in two other headers": (by(("api-key", other), ("x-api-key", good)), INVALID),
        "two keys in one header": (by(bearer(f"{good}, Bearer {other}")), INVALID),
        "a good key beside a password": (
            by(bearer(good), ("Authorization", "Basic eDp5")),
            INVALID,
        ),
    }


@pytest.mark.parametrize("path", ["/generate", "/admin/keys"])
async def test_a_call_without_a_valid_key_gets_nothing(fort: Fort, path: str) -> None:
    """And neither answers nor logs repeat what was sent as one."""
    attacks, before = with_key(fort, path), await fort.names()
    with structlog.testing.capture_logs() as lines:
        for attack, (data, wanted) in attacks.items():
            status, headers, body = await (await fort.sends(data)).answer()
            assert (attack, status, json.loads(body)["error"]["code"]) == (attack, *wanted)
            assert headers["www-authenticate"] == "Bearer"
            assert not any(secret.encode() in body for secret in fort.secrets.values())
    assert fort.untouched
    calls = [line for line in lines if line["event"] == "http_call"]
    assert len(calls) == len(attacks)
    spans = [span.to_json() for span in fort.told.spans()]
    assert len(spans) == len(attacks)
    assert not any(secret in f"{lines}{spans}" for secret in fort.secrets.values())
    assert fort.told.values(HTTP_DURATION)["POST", path, "401"] == len(attacks)
    assert await fort.names() == before
    # It was not for something else.
    for header in (fort.bearer("generate"), ("api-key", fort.secrets["generate"])):
        assert await fort.answers(call("/generate", header)) == (200, "")
    assert len(fort.engine.requests) == 2


async def test_every_key_is_compared_in_the_same_way(
    fort: Fort, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing key takes the same comparison as a nearly right one."""
    compared: list[tuple[int, int]] = []
    compare = api_keys.hmac.compare_digest

    def watched(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", watched)
    good = fort.secrets["generate"]
    for text in (f"ni-{'0' * 12}-{'x' * 43}", good[:-1] + "x", "x", fort.secrets["expired"]):
        assert await fort.answers(call("/generate", bearer(text))) == INVALID
    assert compared == [(64, 64)] * 4


# --- with a key for something else ---------------------------------------------------------------

FOR_OTHERS = {
    "read": """
        POST /generate, PUT /generate, POST /v1/completions, POST /v1/chat/completions,
        POST /v1/responses, POST /v1/messages, POST /abort_request, POST /api/chat,
        POST /api/generate, POST /api/embed
    """,
    "generate": """
        POST /flush_cache, GET /flush_cache, HEAD /flush_cache, POST /pause_generation,
        POST /update_weights_from_disk, POST /update_weights_from_tensor,
        POST /init_weights_update_group, POST /release_memory_occupation, GET /admin/keys,
        HEAD /admin/keys, POST /admin/keys, PATCH /admin/keys/x, DELETE /admin/keys/x,
        PUT /admin/guardrails, PUT /admin/tenants/x, DELETE /api/delete, POST /api/create
    """,
    "weights": "POST /generate, POST /admin/keys",
    "admin": "POST /flush_cache, POST /generate",
}
"""By key, the calls that it is not for."""


async def test_a_key_opens_only_its_scopes(fort: Fort) -> None:
    before = await fort.names()
    calls = [(key, *each.split()) for key, of in FOR_OTHERS.items() for each in of.split(",")]
    for key, method, path in calls:
        body = MAKE_A_KEY if path == "/admin/keys" else BODY
        # What a header says of the method is nobody's concern.
        headers = (fort.bearer(key), ("X-HTTP-Method-Override", "GET"))
        data = call(path, *headers, method=method, body=body)
        status = (await (await fort.sends(data)).reader.readline()).split()[1]
        assert (key, method, path, status) == (key, method, path, b"403")
    assert fort.untouched
    assert await fort.names() == before


# --- by another way in ---------------------------------------------------------------------------

ADMIN_PATHS = r"""
    //admin/keys /admin//keys /admin/keys/ /admin/keys// /admin/./keys /v1/../admin/keys
    /v1/models/../../admin/keys /v1/models/%2e%2e/%2e%2e/admin/keys
    /v1/models/..%2f..%2fadmin%2fkeys /health/../admin/keys /health;/admin/keys
    /health%00/admin/keys /health?/admin/keys /ADMIN/keys /Admin/Keys /%61dmin/keys /admin%2fkeys
    /admin/keys%2f /admin/keys;x=y /admin/keys# /admin/keys%20 /admin/keys%00 /admin\keys
    http://localhost/admin/keys http://127.0.0.1:1/admin/keys *
"""


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("key", ["", "generate"])
async def test_no_other_path_leads_around_the_check(fort: Fort, key: str, method: str) -> None:
    """Neither is a key made nor one listed, however the path is spelt."""
    before = await fort.names()
    headers = (fort.bearer(key),) if key else ()
    for path in ADMIN_PATHS.split():
        data = call(path, *headers, method=method, body=MAKE_A_KEY)
        status, _, body = await (await fort.sends(data)).answer()
        assert (path, b"digest" in body, b'"object":"key"' in body) == (path, False, False)
        free = path == "/health?/admin/keys"
        wanted = (200, 405) if free else (307, 400, 401, 403, 404, 405)
        assert (path, status) in [(path, each) for each in wanted]
    assert fort.untouched
    assert await fort.names() == before


SMUGGLED = call("/admin/keys", body=MAKE_A_KEY)


HEAD = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LENGTH = b"Content-Length: 13\r\n\r\n"
CHUNKED = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"

SMUGGLING: dict[str, tuple[bytes, list[int]]] = {
    "after the end of a body": (LENGTH + BODY + SMUGGLED, [200, 401]),
    "a length and chunks": (
        b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKED + SMUGGLED,
        [400],
    ),
    "two lengths": (
        b"Content-Length: %d\r\n" % (13 + len(SMUGGLED)) + LENGTH + BODY + SMUGGLED,
        [400],
    ),
    "chunks, twice": (
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + CHUNKED + SMUGGLED,
        [400],
    ),
    "chunks, spelt otherwise": (
        b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKED + SMUGGLED,
        [400],
    ),
    "a length with a sign": (b"Content-Length: +13\r\n\r\n" + BODY + SMUGGLED, [400]),
    "a name with a space": (b"X-A : b\r\n" + LENGTH + BODY + SMUGGLED, [400]),
    "a line's end within a value": (b"X-A: b\nX-Tenant: c\r\n" + LENGTH + BODY, [400]),
    "a line's end that is half": (b"X-A: b\rapi-key: c\r\n" + LENGTH + BODY, [400]),
    "a NUL": (b"X-A: b\x00c\r\n" + LENGTH + BODY, [400]),
    "an older version": (LENGTH + BODY + SMUGGLED, [200]),
    "another protocol": (SMUGGLED, [400]),
    "an upgrade": (
        b"Upgrade: h2c\r\nConnection: Upgrade\r\n" + LENGTH + BODY + SMUGGLED,
        [200, 401],
    ),
}
"""Bytes after an allowed call's headers that another program may read as a call of their own, and
the statuses of the answers: the call is refused as a whole, or the rest is a call of its own,
without a key.
"""


@pytest.mark.parametrize("attack", SMUGGLING)
async def test_a_smuggled_call_has_no_key(fort: Fort, attack: str) -> None:
    before, (more, statuses) = await fort.names(), SMUGGLING[attack]
    head = HEAD + "Authorization: Bearer " + fort.secrets["generate"] + "\r\n"
    if attack == "an older version":
        head = head.replace("HTTP/1.1", "HTTP/1.0")
    elif attack == "another protocol":
        head = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    client = await fort.sends(head.encode() + more)
    for status in statuses:
        assert (await client.answer())[0] == status
    if 400 in statuses:
        assert await client.closed()
    assert await fort.names() == before
    # What comes after that on the connection is no part of it, either.
    if statuses == [200] and attack != "an older version":
        client.send(call("/generate"))
        assert await client.code() == MISSING
    assert [request.tenant for request in fort.engine.requests] in ([], ["generate"])


# --- by the mass of it ---------------------------------------------------------------------------


async def test_calls_are_refused_before_their_body_arrives(fort: Fort) -> None:
    """Sixteen million bytes are announced, and the answer is there before the first."""
    head = call(body=b"").replace(b"Content-Length: 0", b"Content-Length: 16000000")
    assert await fort.answers(head) == MISSING


# --- by the gateway itself -----------------------------------------------------------------------


async def test_no_request_makes_the_gateway_fetch_anything(fort: Fort) -> None:
    """Wherever a request names an address, nobody goes there."""
    came = 0

    def on_connection(*_: object) -> None:
        nonlocal came
        came += 1

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
    good = fort.bearer("generate")
    image = {"type": "image_url", "image_url": {"url": url}}
    anthropic = {"type": "image", "source": {"type": "url", "url": url}}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": url, "image_data": url, "lora_path": url, "return_logprob": False},
        "/v1/completions": {"model": url, "prompt": url, "user": url},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [image]}]},
        "/v1/responses": {"input": url, "metadata": {"a": url}, "tools": [{"server_url": url}]},
        "/v1/messages": {
            "model": "tiny",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": [anthropic]}],
        },
        "/tokenize": {"prompt": url, "model": url},
    }
    forwarded = (("Forwarded", f"host={url}"), ("X-Forwarded-Host", url), ("Referer", url))
    for path, body in bodies.items():
        data = call(path, good, *forwarded, body=json.dumps(body).encode())
        status, _ = await fort.answers(data)
        assert (path, status < 500) == (path, True)
    token = fort.issuer.token(fort.issuer.claims(iss=url), jku=url, x5u=url)
    assert await fort.answers(call("/generate", bearer(token))) == INVALID
    # Whoever is to be asked for keys is in the settings alone.
    assert fort.issuer.asked in ([], ["/.well-known/openid-configuration", "/keys"])
    server.close()
    assert came == 0
