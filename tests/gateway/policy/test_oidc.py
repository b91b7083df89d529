"""Tokens of an issuer: which are taken, and for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)

from nano_inference.config import Config, ConfigError, PolicyConfig
from nano_inference.gateway.policy import oidc
from nano_inference.gateway.policy.backend import PolicyUnavailable
from nano_inference.gateway.policy.keys import Unauthenticated
from nano_inference.gateway.policy.oidc import IssuerKeys, TokenAuthenticator, is_token, usable_keys

from ..fake import FakeEngine, app_of, http_of
from .issuer import (
    EC_KEY,
    FLAWS,
    NOWHERE,
    OTHER_RSA_KEY,
    RSA_KEY,
    Issuer,
    NearKeys,
    by_hand,
    issuing,
    jwk,
)


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Verifying:
    """Tokens of one issuer as a gateway takes them, with a clock for its keys."""

    def __init__(self, issuer: Issuer, **settings: Any) -> None:
        self.clock = Clock()
        config = issuer.config(**settings)
        on_a_port = issuer.url != NOWHERE
        keys = IssuerKeys(config, self.clock) if on_a_port else NearKeys(issuer, config, self.clock)
        self.tokens = TokenAuthenticator(config, keys)

    async def refused(self, token: str) -> str:
        with pytest.raises(Unauthenticated) as caught:
            await self.tokens.caller(token)
        assert caught.value.code == "invalid_api_key"
        assert token not in caught.value.message
        return caught.value.message


Verify = Callable[..., Verifying]


@pytest.fixture
async def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
async def served() -> AsyncIterator[Issuer]:
    """On a port."""
    async with issuing() as made:
        yield made


@pytest.fixture
async def verify(issuer: Issuer) -> AsyncIterator[Verify]:
    async with AsyncExitStack() as stack:

        def made(other: Issuer | None = None, **settings: Any) -> Verifying:
            verifying = Verifying(other or issuer, **settings)
            stack.push_async_callback(verifying.tokens.aclose)
            return verifying

        yield made


# --- good tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key_id", ["r", "e"])
async def test_a_token_identifies_its_caller(issuer: Issuer, verify: Verify, key_id: str) -> None:
    caller = await verify().tokens.caller(issuer.token(key_id=key_id))
    assert (caller.key_id, caller.name, caller.tenant) == ("oidc:alice", "alice", "alice")
    assert caller.scopes == {"generate"}
    assert (caller.max_priority, caller.models, caller.limits) == (None, None, ())
    assert issuer.asked == ["/.well-known/openid-configuration", "/keys"]


@pytest.mark.parametrize(
    "changed",
    [{"aud": ["others", "nano-inference"]}, {"iat": None}, {"nbf": 0}, {"exp": 4_000_000_000.5}],
)
async def test_optional_claims_are_accepted(
    issuer: Issuer, verify: Verify, changed: dict[str, Any]
) -> None:
    token = issuer.token(issuer.claims(**changed), typ="at+JWT")
    assert (await verify().tokens.caller(token)).tenant == "alice"


async def test_a_token_without_a_key_id_uses_the_only_key(issuer: Issuer, verify: Verify) -> None:
    token = by_hand({"alg": "ES256"}, issuer.claims(), EC_KEY)
    assert (await verify().tokens.caller(token)).tenant == "alice"


async def test_leeway_allows_for_different_clocks(issuer: Issuer, verify: Verify) -> None:
    """By less than is allowed, and no more."""
    now_s = issuer.claims()["iat"]
    for claims in ({"exp": now_s - 30}, {"nbf": now_s + 30}, {"iat": now_s + 30}):
        token = issuer.token(issuer.claims(**claims))
        assert (await verify(oidc_leeway_s=300.0).tokens.caller(token)).tenant == "alice"
        await verify(oidc_leeway_s=5.0).refused(token)


@pytest.mark.parametrize(
    ("claims", "settings", "scopes"),
    [
        ({"scope": "read weights other"}, {}, {"read", "weights"}),
        ({"scope": ["admin"]}, {}, {"admin"}),
        ({"scope": None}, {}, set()),
        ({"scope": {"admin": 1}}, {}, set()),
        ({"scope": ["admin", 7]}, {}, {"admin"}),
        ({"scope": "nothing"}, {}, set()),
        (
            {"scope": "nano:all"},
            {"oidc_scopes": {"nano:all": "generate weights"}},
            {"generate", "weights"},
        ),
        # The issuer's own meaning of a scope.
        ({"scope": "admin"}, {"oidc_scopes": {"admin": "read"}}, {"read"}),
        ({"roles": ["generate"]}, {"oidc_scopes_claim": "roles"}, {"generate"}),
        ({"realm": {"roles": ["read"]}}, {"oidc_scopes_claim": "realm.roles"}, {"read"}),
        ({"http://a.b/c": "read"}, {"oidc_scopes_claim": "http://a.b/c"}, {"read"}),
        ({"scope": "x"}, {"oidc_scopes_claim": "scope.x.y"}, set()),
    ],
)
async def test_scopes_follow_the_settings(
    issuer: Issuer,
    verify: Verify,
    claims: dict[str, Any],
    settings: dict[str, Any],
    scopes: set[str],
) -> None:
    token = issuer.token(issuer.claims(**claims))
    assert (await verify(**settings).tokens.caller(token)).scopes == scopes


@pytest.mark.parametrize(
    ("org", "said"), [("gold", True), ("", False), ("x" * 129, False), (7, False), ("a\tb", False)]
)
async def test_the_tenant_follows_the_settings(
    issuer: Issuer, verify: Verify, org: object, said: bool
) -> None:
    verifying = verify(oidc_tenant_claim="org")
    token = issuer.token(issuer.claims(org=org))
    if said:
        assert (await verifying.tokens.caller(token)).tenant == org
    else:
        assert "whose requests" in await verifying.refused(token)


def test_an_unknown_scope_is_refused() -> None:
    config = PolicyConfig(
        oidc_issuer="https://a", oidc_audience="b", oidc_scopes={"x": "read generete"}
    )
    with pytest.raises(ConfigError, match="did you mean 'generate'"):
        TokenAuthenticator(config)


@pytest.mark.parametrize(
    ("credential", "token"),
    [("a.b.c", True), ("ni-1-x", False), ("a.b.c.d.e", False), ("a.b", False)],
)
def test_the_form_of_a_token(credential: str, token: bool) -> None:
    assert is_token(credential) is token


async def test_a_gateway_with_an_issuer_and_no_keys(engine: FakeEngine, served: Issuer) -> None:
    policy = served.config()
    app = app_of(engine, Config(policy=policy))
    async with http_of(app) as http:

        async def ask(credential: str, header: str = "Authorization") -> tuple[int, str]:
            value = f"Bearer {credential}" if header == "Authorization" else credential
            answer = await http.post("/generate", json={"text": "a"}, headers={header: value})
            return answer.status_code, answer.json().get("error", {}).get("code", "")

        served.answer = lambda: PlainTextResponse("", 502)
        assert await ask(served.token()) == (503, "policy_unavailable")
        assert await ask(f"ni-{'0' * 12}-{'x' * 43}") == (401, "invalid_api_key")
        assert (await http.post("/generate", json={"text": "a"})).status_code == 401
        assert not engine.requests
        served.answer = None
        app.policy._tokens._keys._next_s = 0.0
        assert await ask(served.token()) == (200, "")
        assert await ask(served.token(), "api-key") == (200, "")
        assert {request.tenant for request in engine.requests} == {"alice"}
        reading = served.token(served.claims(scope="read"))
        assert await ask(reading) == (403, "insufficient_scope")
    await app.policy.aclose()


# --- bad tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flaw", FLAWS)
async def test_any_flaw_is_refused(issuer: Issuer, verify: Verify, flaw: str) -> None:
    verifying = verify()
    await verifying.refused(FLAWS[flaw](issuer))
    # And nothing of it is kept.
    assert verifying.tokens._known == {}
    assert (await verifying.tokens.caller(issuer.token())).tenant == "alice"


async def test_a_cached_token_expires(issuer: Issuer) -> None:
    config, now_s = issuer.config(oidc_leeway_s=0.0), Clock()
    tokens = TokenAuthenticator(config, NearKeys(issuer, config, Clock()), now_s)
    claims = issuer.claims()
    now_s.now_s = claims["exp"] - 1
    token = issuer.token(claims)
    for _ in range(2):
        assert (await tokens.caller(token)).tenant == "alice"
    now_s.now_s += 1
    with pytest.raises(Unauthenticated, match="expired"):
        await tokens.caller(token)
    await tokens.aclose()


async def test_the_cache_of_tokens_is_bounded(
    issuer: Issuer, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_inference.gateway.policy.oidc._MOST_KNOWN", 3)
    verifying = verify()
    for index in range(5):
        await verifying.tokens.caller(issuer.token(issuer.claims(sub=f"s{index}"), key_id="e"))
    assert [known.caller.name for known in verifying.tokens._known.values()] == ["s2", "s3", "s4"]


# --- keys that change, and an issuer that is away ------------------------------------------------


async def test_a_new_key_is_fetched(issuer: Issuer, verify: Verify) -> None:
    """Once for all callers, also for an unknown key; and not again for a while."""
    verifying = verify(oidc_refresh_s=60.0)
    await verifying.tokens.caller(issuer.token())
    issuer.keys["n"] = OTHER_RSA_KEY
    fresh, unknown = issuer.token(key_id="n"), issuer.token(kid="x")
    await verifying.refused(fresh)
    assert issuer.asked.count("/keys") == 1
    verifying.clock.now_s += 60
    made = [verifying.tokens.caller(each) for each in (fresh, unknown) * 20]
    found = await asyncio.gather(*made, return_exceptions=True)
    assert [getattr(each, "tenant", "") for each in found] == ["alice", ""] * 20
    assert issuer.asked.count("/keys") == 2
    await verifying.refused(unknown)
    assert issuer.asked.count("/keys") == 2


async def test_a_withdrawn_key_is_refused(issuer: Issuer, verify: Verify) -> None:
    """Also for cached tokens; the keys are renewed in the background."""
    verifying = verify()
    token = issuer.token()
    await verifying.tokens.caller(token)
    del issuer.keys["r"]
    verifying.clock.now_s += oidc.RENEW_S
    await verifying.tokens.caller(token)
    task = verifying.tokens._keys._task
    await task
    assert "no such key" in await verifying.refused(token)


def _redirect() -> Response:
    return RedirectResponse("http://127.0.0.1:1/elsewhere")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (_redirect, "the answer has the status 307"),
        (lambda: PlainTextResponse("no", 500), "the answer has the status 500"),
        (lambda: PlainTextResponse("[]"), "the answer is not a JSON object"),
        (lambda: PlainTextResponse("[" * 100_000), "the answer is not a JSON object"),
        (lambda: PlainTextResponse("x" * (oidc.MOST_BYTES + 1)), "is larger than"),
        (lambda: JSONResponse({"issuer": "https://example.org"}), "of another issuer"),
    ],
)
async def test_without_keys_every_token_is_refused(
    served: Issuer, verify: Verify, answer: Callable[[], Response], why: str
) -> None:
    verifying, served.answer = verify(served), answer
    with pytest.raises(PolicyUnavailable, match=why):
        await verifying.tokens.caller(served.token())
    assert len(served.asked) == 1
    # No other fetch for a while; then one succeeds.
    served.answer = None
    with pytest.raises(PolicyUnavailable, match=why):
        await verifying.tokens.caller(served.token())
    assert len(served.asked) == 1
    verifying.clock.now_s += 1
    assert (await verifying.tokens.caller(served.token())).tenant == "alice"


@pytest.mark.parametrize("document", [{"jwks_uri": "ftp://a/keys"}, {"jwks_uri": 7}, {}])
async def test_a_discovery_document_without_keys_is_refused(
    served: Issuer, verify: Verify, document: dict[str, Any]
) -> None:
    served.answer = lambda: JSONResponse({"issuer": served.url, **document})
    with pytest.raises(PolicyUnavailable, match="names no place"):
        await verify(served).tokens.caller(served.token())


async def test_tls_is_required_if_the_issuer_has_it(issuer: Issuer) -> None:
    assert oidc._as_safe("https://other/keys", "https://a")
    assert not oidc._as_safe("http://a/keys", "https://a")


async def test_a_fetch_times_out(
    served: Issuer, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc, "FETCH_TIMEOUT_S", 0.01)
    served.held.clear()
    with pytest.raises(PolicyUnavailable, match="no answer in time"):
        await verify(served).tokens.caller(served.token())


async def test_an_endless_answer_delays_no_known_key(
    served: Issuer, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifying, token = verify(served), served.token()
    await verifying.tokens.caller(token)
    monkeypatch.setattr(oidc, "FETCH_TIMEOUT_S", 0.3)
    begun = asyncio.Event()

    async def spaces() -> AsyncIterator[bytes]:
        while True:
            begun.set()
            yield b" "
            await asyncio.sleep(0.001)

    served.answer = lambda: StreamingResponse(spaces())
    verifying.clock.now_s += oidc.RENEW_S
    unknown = served.token(key=OTHER_RSA_KEY, kid="unknown")
    many = [asyncio.create_task(verifying.refused(unknown)) for _ in range(50)]
    await begun.wait()
    for known in (token, served.token(served.claims(sub="bob"))):
        assert (await verifying.tokens.caller(known)).key_id
    assert not any(task.done() for task in many)
    assert {"has no such key" in why for why in await asyncio.gather(*many)} == {True}
    # One fetch for all of them.
    assert served.asked.count("/.well-known/openid-configuration") == 2


async def test_fetches_back_off_and_log_once(served: Issuer, verify: Verify) -> None:
    verifying = verify(served, oidc_refresh_s=60.0, oidc_jwks_url="http://127.0.0.1:1/keys")
    waits_s = []
    with structlog.testing.capture_logs() as lines:
        for _ in range(9):
            with pytest.raises(PolicyUnavailable):
                await verifying.tokens.caller(served.token())
            keys = verifying.tokens._keys
            waits_s.append(keys._next_s - verifying.clock.now_s)
            verifying.clock.now_s = keys._next_s
    for index, wait_s in enumerate(waits_s):
        longest_s = min(60, 2**index)
        assert longest_s / 2 <= wait_s <= longest_s
    assert [line["event"] for line in lines] == ["oidc_keys_not_fetched"]


async def test_fetched_keys_hold_for_a_day(served: Issuer, verify: Verify) -> None:
    verifying = verify(served)
    token = served.token()
    await verifying.tokens.caller(token)
    served.answer = lambda: PlainTextResponse("", 503)
    verifying.clock.now_s += oidc.MOST_AGE_S - 1
    assert (await verifying.tokens.caller(token)).tenant == "alice"
    verifying.clock.now_s += 2
    with pytest.raises(PolicyUnavailable, match="status 503"):
        await verifying.tokens.caller(token)


async def test_a_cancelled_waiter_does_not_cancel_the_fetch(served: Issuer, verify: Verify) -> None:
    verifying = verify(served)
    served.held.clear()
    first, second = (asyncio.create_task(verifying.tokens.caller(served.token())) for _ in range(2))
    while not served.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)
    first.cancel()
    served.held.set()
    assert (await second).tenant == "alice"
    assert first.cancelled()


# --- which keys ----------------------------------------------------------------------------------

WEAK = rsa.generate_private_key(65537, 1024)


@pytest.mark.parametrize(
    "key",
    [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "r", "alg": "HS256"},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "r", "alg": "RS256"},
        jwk("r", RSA_KEY, use="enc"),
        jwk("r", RSA_KEY, key_ops=["encrypt"]),
        jwk("r", RSA_KEY, alg="PS256"),
        jwk("r", RSA_KEY, alg="HS256"),
        jwk("r", RSA_KEY, kid=7),
        jwk("r", RSA_KEY, n="AQAB"),
        jwk("r", RSA_KEY, kty=["RSA"]),
        jwk("r", EC_KEY, crv="P-384"),
        jwk("r", EC_KEY, x="AAAA"),
        jwk("r", WEAK),
        {**jwk("r", EC_KEY), "d": "AAAA"},
        {"kty": "OKP", "crv": "Ed25519", "x": "AAAA", "kid": "r"},
        "a key",
        None,
    ],
)
def test_keys_for_other_uses_are_ignored(key: object) -> None:
    good = jwk("e", EC_KEY)
    assert [found.key_id for found in usable_keys({"keys": [key, good]})] == ["e"]


def test_private_keys_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding a modulus's factors from its exponents takes minutes for a long one."""
    read: list[object] = []
    monkeypatch.setattr(oidc, "PyJWK", lambda key, _: read.append(key))
    long = jwk("r", RSA_KEY, n="_" * 10_000, d="_" * 1000)
    assert usable_keys({"keys": [long] * oidc.MOST_KEYS}) == []
    assert read == []


def test_other_curves_are_ignored() -> None:
    other = ec.generate_private_key(ec.SECP384R1())
    assert usable_keys({"keys": [jwk("r", other, crv="P-384", alg="ES384")]}) == []


@pytest.mark.parametrize("jwks", [{}, {"keys": {}}, {"keys": "x"}, {"keys": None}])
def test_a_malformed_key_set_is_empty(jwks: dict[str, Any]) -> None:
    assert usable_keys(jwks) == []
