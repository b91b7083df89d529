"""Base64 as browsers read it."""

from __future__ import annotations

import base64
from contextlib import suppress

_WHITE_SPACE = b"\t\n\f\r "


def decode_base64(text: str | bytes) -> bytes:
    """Return the bytes of a text in base64 by WHATWG's forgiving rule: white space anywhere is
    ignored, and the padding may be absent. https://infra.spec.whatwg.org/#forgiving-base64-decode

    Raises:
        ValueError: It is no base64.
    """
    data = text.encode(errors="replace") if isinstance(text, str) else text
    compact = data.translate(None, _WHITE_SPACE)
    if len(compact) % 4 == 0:
        compact = compact[:-2] if compact.endswith(b"==") else compact.removesuffix(b"=")
    if b"=" not in compact and len(compact) % 4 != 1:
        with suppress(ValueError):
            return base64.b64decode(compact + b"=" * (-len(compact) % 4), validate=True)
    raise ValueError("this is no base64")
