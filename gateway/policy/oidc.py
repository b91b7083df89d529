"""Tokens of an OpenID Connect issuer (JWT) in place of API keys.

PyJWT parses keys and verifies tokens. Keys are fetched here: its `PyJWKClient` blocks a thread
under a lock, reads an answer of any size for any time, and keeps no keys while the issuer is down.

Sources: RFC 7517 (JWK), RFC 7519 (JWT), RFC 8725 (best practices), RFC 9068 (access tokens), and
https://openid.net/specs/openid-connect-discovery-1_0.html.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import httpx2
import jwt
import msgspec
from jwt import PyJWK, PyJWTError

from ...config import ConfigError, PolicyConfig, nearest
from ...config.logger import get_logger
from ..call import MAX_TENANT_LENGTH
from ..caller import SCOPES, Caller, Scope
from .backend import PolicyUnavailable
from .keys import Unauthenticated

RENEW_S = 3600.0
"""Age at which keys are fetched again in the background, so that withdrawn keys expire."""

MOST_AGE_S = 86_400.0
"""Age until which keys hold while the issuer is down. An attacker who cuts the connection must not
keep a withdrawn key alive for longer."""

FETCH_TIMEOUT_S = 5.0
MOST_BYTES = 1 << 20
MOST_KEYS = 100

MAX_TOKEN_LENGTH = 8192
"""Characters; parsing an unverified token takes time in proportion."""

MAX_SUBJECT_LENGTH = 256

_DISCOVERY = "/.well-known/openid-configuration"
_FIRST_WAIT_S = 1.0
# By key type the algorithm, and the sizes of keys in bits. PyJWT checks the curve.
_KEY_TYPES = {"RSA": ("RS256", range(2048, 8193)), "EC": ("ES256", range(256, 257))}
_ALGORITHMS = [algorithm for algorithm, _ in _KEY_TYPES.values()]
# Headers by which a token brings or names its own key. PyJWT refuses critical ones.
_REFUSED_HEADERS = ("jku", "jwk", "x5u", "x5c")
_TYPES = ("jwt", "at+jwt")
_TIMES = ("exp", "nbf", "iat")
_REQUIRED = ["exp", "iss", "aud", "sub"]
_MOST_KNOWN = 1024


class _NotFetchedError(Exception):
    """The keys were not fetched. The message says why."""


class IssuerKeys:
    """The current signing keys of an issuer.

    Attributes:
        generation: Incremented when the keys change.
    """

    def __init__(self, config: PolicyConfig, now_s: Callable[[], float]) -> None:
        """`now_s`: a monotonic clock."""
        self.generation = 0
        self._config = config
        self._now_s = now_s
        self._client: httpx2.AsyncClient | None = None
        self._keys: list[PyJWK] = []
        self._jwks: dict[str, Any] = {}
        self._fetched_s: float | None = None
        self._next_s = now_s()
        self._failures = 0
        self._why_not = "they were not fetched yet"
        self._task: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until there are keys that may be used.

        Raises:
            PolicyUnavailable: There are none.
        """
        if self._age_s >= MOST_AGE_S:
            await self._fetched()
            if self._age_s >= MOST_AGE_S:
                raise PolicyUnavailable(
                    "the issuer's keys can't be had, so no token is taken; try again later",
                    detail=f"the keys of {self._config.oidc_issuer} can't be had, so no token is "
                    f"taken: {self._why_not}",
                )
        elif self._age_s >= RENEW_S:
            self._begin()

    async def find(self, algorithm: str, key_id: str) -> PyJWK | None:
        """Return the key of an algorithm and an id; with "" the algorithm's only key.

        An unknown id fetches the keys again, at most once per `policy.oidc_refresh_s` for all
        callers together.
        """
        if (key := self._look(algorithm, key_id)) is None:
            await self._fetched()
            key = self._look(algorithm, key_id)
        return key

    async def aclose(self) -> None:
        """Cancel a fetch in flight, and close the connections."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._client is not None:
            await self._client.aclose()

    @property
    def _age_s(self) -> float:
        return MOST_AGE_S if self._fetched_s is None else self._now_s() - self._fetched_s

    def _look(self, algorithm: str, key_id: str) -> PyJWK | None:
        fitting = [
            key
            for key in self._keys
            if key.algorithm_name == algorithm and key_id in ("", key.key_id)
        ]
        return fitting[0] if len(fitting) == 1 else None

    async def _fetched(self) -> None:
        """Wait for the fetch in flight or a new one; return at once while it is too early."""
        if (task := self._begin()) is not None:
            # Shielded, since other calls wait for it as well.
            await asyncio.shield(task)

    def _begin(self) -> asyncio.Task[None] | None:
        if self._task is None or self._task.done():
            if self._now_s() < self._next_s:
                return None
            self._task = asyncio.create_task(self._fetch(), name="keys of the issuer")
        return self._task

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                jwks = await self._get(await self._address())
            if not (found := usable_keys(jwks)):
                raise _NotFetchedError("there are none for RS256 or ES256")
        except httpx2.InvalidURL:
            self._failed("the address is none")
        except (_NotFetchedError, httpx2.HTTPError, TimeoutError, OSError) as error:
            self._failed(str(error) or "no answer in time")
        else:
            self._fetched_s = self._now_s()
            self._next_s = self._fetched_s + self._config.oidc_refresh_s
            self._failures = 0
            self._why_not = ""
            if jwks != self._jwks:
                self._keys, self._jwks = found, jwks
                self.generation += 1
                get_logger().info("oidc_keys_fetched", keys=len(found))

    def _failed(self, why: str) -> None:
        if why != self._why_not:
            get_logger().error("oidc_keys_not_fetched", error=why)
        self._why_not = why
        wait_s = min(self._config.oidc_refresh_s, _FIRST_WAIT_S * 2.0 ** min(self._failures, 30))
        self._failures += 1
        # Jitter, so that gateways don't come back together.
        self._next_s = self._now_s() + wait_s * random.uniform(0.5, 1.0)

    async def _address(self) -> str:
        """Return the URL of the keys."""
        if self._config.oidc_jwks_url:
            return self._config.oidc_jwks_url
        issuer = self._config.oidc_issuer
        document = await self._get(issuer.removesuffix("/") + _DISCOVERY)
        address = document.get("jwks_uri")
        if document.get("issuer") != issuer:
            raise _NotFetchedError("its discovery document is of another issuer")
        # Without TLS, anyone on the way could replace the keys.
        if not isinstance(address, str) or not _as_safe(address, issuer):
            raise _NotFetchedError("its discovery document names no place of its keys with https")
        return address

    async def _get(self, address: str) -> dict[str, Any]:
        if self._client is None:
            # No redirects: only the configured issuer is contacted.
            self._client = httpx2.AsyncClient(follow_redirects=False, timeout=FETCH_TIMEOUT_S)
        # Compressed, a small answer could be of any size.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        body = bytearray()
        async with self._client.stream("GET", address, headers=headers) as response:
            if response.status_code != 200:
                raise _NotFetchedError(f"the answer has the status {response.status_code}")
            async for part in response.aiter_raw():
                body += part
                if len(body) > MOST_BYTES:
                    raise _NotFetchedError(f"the answer is larger than {MOST_BYTES} bytes")
        with suppress(ValueError, RecursionError):
            return msgspec.json.decode(body, type=dict[str, Any])
        raise _NotFetchedError("the answer is not a JSON object")


def usable_keys(jwks: Mapping[str, Any]) -> list[PyJWK]:
    """Return the keys of a set that may sign tokens: no secrets (`oct`), encryption keys, or weak
    keys."""
    listed = jwks.get("keys")
    usable: list[PyJWK] = []
    for jwk in listed[:MOST_KEYS] if isinstance(listed, list) else ():
        # A published private key signs for everybody. Parsing one factors its modulus, which takes
        # minutes for one of 10,000 bytes.
        if not isinstance(jwk, dict) or not isinstance(jwk.get("kid", ""), str) or "d" in jwk:
            continue
        algorithm, sizes = _KEY_TYPES.get(str(jwk.get("kty")), ("", range(0)))
        for_tokens = jwk.get("use", "sig") == "sig" and "verify" in jwk.get("key_ops", ["verify"])
        if not algorithm or not for_tokens or jwk.get("alg", algorithm) != algorithm:
            continue
        with suppress(PyJWTError, ValueError, TypeError):
            key = PyJWK(jwk, algorithm)
            if key.key.key_size in sizes:
                usable.append(key)
    return usable


def _as_safe(address: str, issuer: str) -> bool:
    """Return whether an address has TLS, if the issuer has."""
    return address.startswith(("https://", issuer.partition("://")[0] + "://"))


class _CachedCaller(NamedTuple):
    caller: Caller
    ends_s: float
    generation: int


def is_token(credential: str) -> bool:
    """Return whether a credential has the form of a JWT. API keys have no dots."""
    return credential.count(".") == 2


class TokenAuthenticator:
    """Authenticates callers by their tokens."""

    def __init__(
        self,
        config: PolicyConfig,
        keys: IssuerKeys | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Args: the settings, with `oidc_issuer`; the issuer's keys, None to fetch them; and the
        wall clock.

        Raises:
            ConfigError: `oidc_scopes` names an unknown scope.
        """
        for scope in " ".join(config.oidc_scopes.values()).split():
            if scope not in SCOPES:
                raise ConfigError(
                    f"policy.oidc_scopes: there is no scope {scope!r:.80}{nearest(scope, SCOPES)}"
                )
        self._config = config
        self._now_s = now_s
        self._keys = keys or IssuerKeys(config, time.monotonic)
        # By the token's hash, since a token may be as good as a password.
        self._known: dict[bytes, _CachedCaller] = {}

    async def caller(self, token: str) -> Caller:
        """Return the caller that a token stands for.

        Raises:
            Unauthenticated: invalid_api_key: the token is not valid here and now.
            PolicyUnavailable: The issuer's keys are not available.
        """
        if len(token) > MAX_TOKEN_LENGTH or not token.isascii():
            raise _refused("it is too long, or not one")
        await self._keys.ready()
        digest = hashlib.sha256(token.encode()).digest()
        known = self._known.get(digest)
        if known is not None and known.generation == self._keys.generation:
            if known.ends_s <= self._now_s():
                raise _refused("it has expired")
            return known.caller
        algorithm, key_id = _header(token)
        if (key := await self._keys.find(algorithm, key_id)) is None:
            raise _refused("the issuer has no such key for its algorithm")
        generation = self._keys.generation
        try:
            claims = jwt.decode(
                token,
                key,
                audience=self._config.oidc_audience,
                issuer=self._config.oidc_issuer,
                leeway=self._config.oidc_leeway_s,
                options={"require": _REQUIRED},
            )
        except PyJWTError as error:
            raise _refused(str(error)) from None
        except (ValueError, TypeError, RecursionError):
            raise _refused("it is malformed") from None
        for name in _TIMES:
            # PyJWT takes text as well.
            value = claims.get(name, 0)
            if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
                raise _refused(f"{name} is no time")
        caller = self._caller_with(claims)
        while len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        ends_s = claims["exp"] + self._config.oidc_leeway_s
        self._known[digest] = _CachedCaller(caller, ends_s, generation)
        return caller

    async def aclose(self) -> None:
        await self._keys.aclose()

    def _caller_with(self, claims: Mapping[str, Any]) -> Caller:
        subject = claims["sub"]
        if not _is_name(subject, MAX_SUBJECT_LENGTH):
            raise _refused("its subject (sub) is no name")
        tenant = _claim(claims, self._config.oidc_tenant_claim)
        if not _is_name(tenant, MAX_TENANT_LENGTH):
            raise _refused("it does not say whose requests are made with it (oidc_tenant_claim)")
        return Caller(
            key_id=f"oidc:{subject}",
            name=subject,
            tenant=tenant,
            scopes=self._scopes(_claim(claims, self._config.oidc_scopes_claim)),
        )

    def _scopes(self, claim: Any) -> frozenset[Scope]:
        """Return the scopes of a claim, which is a list or words; of any other none."""
        words = claim.split() if isinstance(claim, str) else claim
        given = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
        meant = {
            scope for word in given for scope in self._config.oidc_scopes.get(word, word).split()
        }
        return frozenset(scope for scope in SCOPES if scope in meant)


def _header(token: str) -> tuple[str, str]:
    """Return the algorithm and the key id of a token.

    Nothing of it is verified yet, so it only selects one of the issuer's keys.
    """
    try:
        header = jwt.get_unverified_header(token)
    except (PyJWTError, ValueError, TypeError, RecursionError):
        raise _refused("it is malformed") from None
    algorithm: Any = header.get("alg")
    kind = header.get("typ", "JWT")
    if algorithm not in _ALGORITHMS:
        raise _refused("its algorithm is none of RS256 and ES256")
    if any(name in header for name in _REFUSED_HEADERS):
        raise _refused("its header has what is not taken there")
    if not isinstance(kind, str) or kind.lower().removeprefix("application/") not in _TYPES:
        raise _refused("it is of a kind that is for something else")
    return algorithm, header.get("kid", "")


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return a claim, or one nested in others by a dotted path; None if there is none."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_name(value: Any, longest: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(
        f"the token is not taken: {why}; get another one", code="invalid_api_key"
    )
