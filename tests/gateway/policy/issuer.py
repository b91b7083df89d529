"""A local OpenID Connect issuer, and valid and invalid tokens of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nano_inference.config import GatewayConfig, PolicyConfig
from nano_inference.gateway.policy.oidc import IssuerKeys
from nano_inference.gateway.server.server import HttpServer

from ..served import listening

AUDIENCE = "nano-inference"
NOWHERE = "https://issuer.example"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey
Claims = dict[str, Any]

# Made once: RSA keys take a while.
RSA_KEY = rsa.generate_private_key(65537, 2048)
OTHER_RSA_KEY = rsa.generate_private_key(65537, 2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def algorithm_of(key: PrivateKey) -> str:
    return "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256"


def jwk(key_id: str, key: PrivateKey, **more: Any) -> dict[str, Any]:
    """The public key, as in a JWK set."""
    if isinstance(key, rsa.RSAPrivateKey):
        found = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        found = jwt.algorithms.ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**found, "kid": key_id, "use": "sig", "alg": algorithm_of(key), **more}


def pem(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


class Issuer:
    """Signs tokens, and tells by which keys.

    Attributes:
        keys: By their ids.
        asked: The paths that were asked for.
        answer: Given instead of what is right, if not None.
        held: Unless set, nobody is answered.
    """

    def __init__(self) -> None:
        self.keys: dict[str, PrivateKey] = {"r": RSA_KEY, "e": EC_KEY}
        self.asked: list[str] = []
        self.answer: Callable[[], Response] | None = None
        self.held = asyncio.Event()
        self.held.set()
        self.url = NOWHERE

    def config(self, **settings: Any) -> PolicyConfig:
        return PolicyConfig(oidc_issuer=self.url, oidc_audience=AUDIENCE, **settings)

    def claims(self, **changed: Any) -> Claims:
        """Good ones; None takes one away."""
        now_s = int(time.time())
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "alice",
            "exp": now_s + 600,
            "iat": now_s,
            "scope": "openid generate",
        }
        return {name: each for name, each in (claims | changed).items() if each is not None}

    def token(
        self,
        claims: Claims | None = None,
        key_id: str = "r",
        key: PrivateKey | None = None,
        **headers: Any,
    ) -> str:
        """A token signed with the key of that id, or with another key."""
        key = key or self.keys[key_id]
        given = self.claims() if claims is None else claims
        return by_hand(
            {"alg": algorithm_of(key), "kid": key_id, "typ": "JWT"} | headers, given, key
        )

    def document(self, path: str) -> dict[str, Any]:
        """The valid document at a path."""
        self.asked.append(path)
        if path == "/keys":
            return {"keys": [jwk(*each) for each in self.keys.items()]}
        return {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}

    async def respond(self, request: Request) -> Response:
        right = self.document(request.url.path)
        await self.held.wait()
        return JSONResponse(right) if self.answer is None else self.answer()


class NearKeys(IssuerKeys):
    """The keys of an issuer without a port."""

    def __init__(self, issuer: Issuer, config: PolicyConfig, now_s: Callable[[], float]) -> None:
        super().__init__(config, now_s)
        self._issuer = issuer

    async def _get(self, address: str) -> dict[str, Any]:
        return self._issuer.document(urlsplit(address).path)


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    """An issuer that answers."""
    issuer = Issuer()
    app = Starlette(
        routes=[
            Route("/.well-known/openid-configuration", issuer.respond),
            Route("/keys", issuer.respond),
        ]
    )
    async with listening(HttpServer(app, GatewayConfig())) as port:
        issuer.url = f"http://127.0.0.1:{port}"
        yield issuer
        issuer.held.set()


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def signed(text: str, key: PrivateKey) -> bytes:
    found: bytes = jwt.get_algorithm_by_name(algorithm_of(key)).sign(text.encode(), key)
    return found


def by_hand(header: dict[str, Any], claims: Any, key: PrivateKey | bytes | None) -> str:
    """A token whose header may be false: signed by the key's algorithm; by HMAC with bytes."""
    text = f"{b64(json.dumps(header).encode())}.{b64(json.dumps(claims).encode())}"
    if key is None:
        return f"{text}."
    if isinstance(key, bytes):
        return f"{text}.{b64(hmac.digest(key, text.encode(), hashlib.sha256))}"
    return f"{text}.{b64(signed(text, key))}"


def _with_claims(**changed: Any) -> Callable[[Issuer], str]:
    return lambda issuer: issuer.token(issuer.claims(**changed))


def _with_header(**headers: Any) -> Callable[[Issuer], str]:
    return lambda issuer: issuer.token(**headers)


def _altered(issuer: Issuer) -> str:
    head, _, signature = issuer.token().split(".")
    return f"{head}.{b64(json.dumps(issuer.claims(scope='admin')).encode())}.{signature}"


def _cut(issuer: Issuer) -> str:
    return issuer.token()[:-4]


def _by(key: bytes | None, alg: str, key_id: str = "r") -> Callable[[Issuer], str]:
    return lambda issuer: by_hand({"alg": alg, "kid": key_id}, issuer.claims(), key)


def _zeros(issuer: Issuer) -> str:
    """A signature of nothing but zeros, which careless arithmetic takes for any text."""
    return f"{issuer.token(key_id='e').rpartition('.')[0]}.{b64(bytes(64))}"


def _in_der(issuer: Issuer) -> str:
    text, _, signature = issuer.token(key_id="e").rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "==")
    return f"{text}.{b64(jwt.utils.raw_to_der_signature(raw, ec.SECP256R1()))}"


def _nested(issuer: Issuer) -> str:
    return f"{b64(b'[' * 3000)}.{b64(b'[' * 2000)}.{b64(b'x')}"


_NOW = int(time.time())
_LATER = _NOW + 10**6

FLAWS: dict[str, Callable[[Issuer], str]] = {
    # The algorithm.
    "no algorithm": _by(None, "none"),
    "no algorithm, spelt otherwise": _by(None, "nOnE"),
    "no algorithm, with a signature": _by(b"", "none"),
    "the public key as a secret": _by(pem(RSA_KEY), "HS256"),
    "the other public key as a secret": _by(pem(EC_KEY), "HS256", "e"),
    "an empty secret": _by(b"", "HS256"),
    "an algorithm that is not offered": _with_header(alg="RS512"),
    "another algorithm of the same key": _with_header(alg="PS256"),
    "an algorithm that is no name": _with_header(alg=["RS256"]),
    "a key of another algorithm": _with_header(kid="e"),
    "an algorithm that is not its key's": lambda issuer: issuer.token(key_id="e", alg="RS256"),
    # The key.
    "somebody else's key": lambda issuer: issuer.token(key=OTHER_RSA_KEY),
    "a key that is not there": _with_header(kid="x"),
    "a key that is no name": _with_header(kid=1),
    "no key named, of several": lambda issuer: _two(issuer),
    "its own key": lambda issuer: issuer.token(key=OTHER_RSA_KEY, jwk=jwk("r", OTHER_RSA_KEY)),
    "the address of its own key": _with_header(jku="http://127.0.0.1:1/keys"),
    "the address of its own certificate": _with_header(x5u="http://127.0.0.1:1/x"),
    "its own certificate": _with_header(x5c=["MIIB"]),
    "what must be understood": _with_header(crit=["exp"]),
    "a body that is not encoded": _with_header(b64=False, crit=["b64"]),
    "another kind of token": _with_header(typ="logout+jwt"),
    # The signature.
    "no signature": lambda issuer: f"{issuer.token().rpartition('.')[0]}.",
    "a signature that is cut": _cut,
    "other claims than were signed": _altered,
    "a signature of zeros": _zeros,
    "a signature in another form": _in_der,
    # The time.
    "expired": _with_claims(exp=_NOW - 10**4),
    "no end": _with_claims(exp=None),
    "an end that is text": _with_claims(exp=str(_LATER)),
    "an end that is true": _with_claims(exp=True),
    "an end that never comes": _with_claims(exp=float("inf")),
    "not yet": _with_claims(nbf=_LATER, exp=_LATER + 1),
    "a beginning that is text": _with_claims(nbf="0"),
    "made in the future": _with_claims(iat=_LATER, exp=_LATER + 1),
    "made before all time": _with_claims(iat=-1),
    # Issuer, audience and subject.
    "another issuer": _with_claims(iss="https://example.org"),
    "nearly this issuer": lambda issuer: issuer.token(issuer.claims(iss=f"{issuer.url}/")),
    "no issuer": _with_claims(iss=None),
    "issuers": lambda issuer: issuer.token(issuer.claims(iss=[issuer.url])),
    "for somebody else": _with_claims(aud="somebody"),
    "for nobody": _with_claims(aud=None),
    "for others": _with_claims(aud=["somebody", AUDIENCE + "2"]),
    "for what is no name": _with_claims(aud={AUDIENCE: 1}),
    "of nobody": _with_claims(sub=None),
    "of a number": _with_claims(sub=7),
    "of an empty name": _with_claims(sub=""),
    "of a name with a line's end": _with_claims(sub="a\nb"),
    # The form.
    "not base64": lambda issuer: issuer.token().replace(".", ".!", 1),
    "not JSON": lambda issuer: f"{b64(b'x')}.{b64(b'y')}.{b64(b'z')}",
    "no object": lambda issuer: f"{b64(b'[]')}.{b64(b'[]')}.{b64(b'z')}",
    "claims that are none": lambda issuer: by_hand({"alg": "RS256", "kid": "r"}, [1], RSA_KEY),
    "nested deeply": _nested,
    "empty": lambda issuer: "..",
    "too long": _with_claims(more="x" * 10_000),
    "not ASCII": lambda issuer: "ä." + issuer.token().partition(".")[2],
}
"""Tokens with exactly one flaw."""


def _two(issuer: Issuer) -> str:
    issuer.keys["s"] = OTHER_RSA_KEY
    return by_hand({"alg": "RS256"}, issuer.claims(), RSA_KEY)
