"""`Idempotency-Key`: a call that is sent again is not made again.

As in draft-ietf-httpapi-idempotency-key-header: the same key with another body is answered 422.
"""

from __future__ import annotations

import hashlib
import re

import msgspec
from starlette.requests import Request

from ....config import RequestError
from ...server.http import MODEL
from ...serving.fields import Body

HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 255
"""Characters; as many as others take."""

_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}")


class Keyed(msgspec.Struct, frozen=True):
    """What a call with a key is known by.

    Attributes:
        name: Of the key and whose it is.
        digest: Of the call that was made with it.
    """

    name: str
    digest: str


def keyed(request: Request, tenant: str, body: Body) -> Keyed | None:
    """What a call is known by; None when it has no key.

    Raises:
        RequestError: invalid_idempotency_key.
    """
    keys = request.headers.getlist(HEADER)
    if not keys:
        return None
    if len(keys) > 1 or not _KEY.fullmatch(keys[0]):
        raise RequestError(
            f"{HEADER} must be 1 to {MAX_KEY_LENGTH} visible ASCII characters, and come once",
            code="invalid_idempotency_key",
        )
    asked = msgspec.json.encode(body, order="deterministic")
    # By its own address a model is asked without being named.
    model = request.scope.get("state", {}).get(MODEL)
    about = [request.url.path, asked.hex(), *([model] if model else [])]
    return Keyed(_digest(tenant, keys[0]), _digest(*about))


def check_same(first: Keyed | None, again: Keyed) -> None:
    """Raises RequestError (idempotency_key_reused) unless both are the same call."""
    if first != again:
        raise RequestError(
            f"this {HEADER} came with another call before, which is kept for as long as its "
            "results; take a new key for each call, and the same body with the same key",
            code="idempotency_key_reused",
        )


def _digest(*parts: str) -> str:
    encoded = msgspec.json.encode(parts)
    return hashlib.sha256(encoded).hexdigest()
