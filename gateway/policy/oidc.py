"""Tokens of an OpenID Connect issuer (JWT) in the place of API keys.

Sources: RFC 7519 (JWT), RFC 8725 (what has gone wrong with them), RFC 9068 (access tokens).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jwt
import msgspec

from ...config import ConfigError, PolicyConfig, nearest
from .caller import Caller
from .document import MAX_TENANT_LENGTH
from .jwks import Algorithm, IssuerKeys
from .keys import Unauthenticated
from .scopes import SCOPES, Scope

MAX_TOKEN_LENGTH = 8192
"""Characters; what reads a token takes longer for each of them, before it is known to be good."""

MAX_SUBJECT_LENGTH = 256

_ALGORITHMS: tuple[str, ...] = get_args(Algorithm)
# In these a token brings or names the key that it is to be checked with, or asks for something that
# must not be ignored.
_REFUSED_HEADERS = ("jku", "jwk", "x5u", "x5c", "crit", "b64")
_TYPES = ("jwt", "at+jwt")
_TIMES = ("exp", "nbf", "iat")
_REQUIRED = ["exp", "iss", "aud", "sub"]
_MOST_KNOWN = 1024

_WHY: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "it has expired"),
    (jwt.ImmatureSignatureError, "it is not valid yet"),
    (jwt.MissingRequiredClaimError, "it lacks one of exp, iss, aud and sub"),
    (jwt.InvalidAudienceError, "it is for somebody else (aud)"),
    (jwt.InvalidIssuerError, "it is of another issuer (iss)"),
    (jwt.InvalidSignatureError, "its signature is wrong"),
)


class _Known(NamedTuple):
    caller: Caller
    ends_s: float
    generation: int


def is_token(credential: str) -> bool:
    """Whether it has the form of a JWT; API keys have no dots."""
    return credential.count(".") == 2


class Tokens:
    """Tells whose a token is."""

    def __init__(
        self,
        config: PolicyConfig,
        keys: IssuerKeys | None = None,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Args: the settings, in which `oidc_issuer` is set; the issuer's keys, None for those
        that it has; and the time of day.

        Raises:
            ConfigError: `oidc_scopes` names what is no scope.
        """
        for meant in config.oidc_scopes.values():
            for scope in meant.split():
                if scope not in SCOPES:
                    raise ConfigError(
                        f"policy.oidc_scopes: there is no scope {scope!r:.80}"
                        f"{nearest(scope, SCOPES)}"
                    )
        self._config = config
        self._now_s = now_s
        self._keys = keys or IssuerKeys(config, time.monotonic)
        # By the token's hash, since a token may be as good as a password.
        self._known: dict[bytes, _Known] = {}

    async def caller(self, token: str) -> Caller:
        """Whose a token is.

        Raises:
            Unauthenticated: invalid_api_key: it is not good, or not for us, or not now.
            PolicyUnavailable: That can't be told, for want of the issuer's keys.
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
                algorithms=[algorithm],
                audience=self._config.oidc_audience,
                issuer=self._config.oidc_issuer,
                leeway=self._config.oidc_leeway_s,
                options={"require": _REQUIRED},
            )
        except jwt.PyJWTError as error:
            why = next((why for kind, why in _WHY if isinstance(error, kind)), "it is malformed")
            raise _refused(why) from None
        except (ValueError, TypeError, RecursionError):
            raise _refused("it is malformed") from None
        _check_times(claims)
        ends_s = claims["exp"] + self._config.oidc_leeway_s
        found = _Known(self._caller_with(claims), ends_s, generation)
        while len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[digest] = found
        return found.caller

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
        """What is neither a list nor words gives none."""
        words = claim.split() if isinstance(claim, str) else claim
        given = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
        meant = {
            scope for word in given for scope in self._config.oidc_scopes.get(word, word).split()
        }
        return frozenset(scope for scope in SCOPES if scope in meant)


def _header(token: str) -> tuple[Algorithm, str]:
    """The algorithm that a token says, and the id of its key.

    It is read before anything is known to be true, so it decides only which of the issuer's keys
    the token is held against.
    """
    first = token.partition(".")[0]
    try:
        header = msgspec.json.decode(
            base64.b64decode(first + "=" * (-len(first) % 4), b"-_", validate=True),
            type=dict[str, Any],
        )
    except (ValueError, RecursionError, binascii.Error):
        raise _refused("it is malformed") from None
    algorithm, key_id, kind = header.get("alg"), header.get("kid", ""), header.get("typ", "JWT")
    if algorithm not in _ALGORITHMS:
        raise _refused("its algorithm is none of RS256 and ES256")
    if not isinstance(key_id, str) or any(name in header for name in _REFUSED_HEADERS):
        raise _refused("its header has what is not taken there")
    if not isinstance(kind, str) or kind.lower().removeprefix("application/") not in _TYPES:
        raise _refused("it is of a kind that is for something else")
    return algorithm, key_id


def _check_times(claims: Mapping[str, Any]) -> None:
    """Numbers only; the reader takes text as well. Raises Unauthenticated."""
    for name in _TIMES:
        value = claims.get(name, 0)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise _refused(f"{name} is no time")


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """One claim, or one within others, with dots between their names; None where there is none."""
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
