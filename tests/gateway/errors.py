"""Errors of answers."""

from __future__ import annotations

from typing import Any

import httpx


def error_of(response: httpx.Response, status: int) -> str:
    """Return the code of an error in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["type"] == "server_error") == (status >= 500)
    return str(error["code"])


def code_of(answer: httpx.Response, status: int) -> str:
    """Return the code of an error in any interface's form; KServe's is in a header."""
    assert answer.status_code == status, answer.text
    return str(answer.headers.get("X-Error-Code") or answer.json()["error"]["code"])


def invalid(
    param: str, code: str = "invalid_request", **fields: Any
) -> tuple[dict[str, Any], str, str]:
    """Fields of a body, with the code and the param of the error that refuses them."""
    return fields, code, param
