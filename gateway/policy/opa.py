"""Decisions of an Open Policy Agent."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import msgspec

from ...config import PolicyConfig, shown

MOST_BYTES = 64 << 10
"""Bytes of an answer."""


class Decision(msgspec.Struct, frozen=True):
    """A decision. `reason`: the agent's own words for a refusal; "" if it gives none."""

    allow: bool
    reason: str = ""


class _OpaResult(msgspec.Struct, frozen=True):
    result: bool | Decision


class NoDecision(Exception):
    """The agent has not decided. The message says why."""


class OpenPolicyAgent:
    """Asks an agent over its REST API (`POST /v1/data/<policy>`).

    The answer is `{"result": true}`, or `{"result": {"allow": false, "reason": "…"}}`. Any other
    answer, or none in time, is no decision: an undefined policy answers `{}`.
    """

    def __init__(self, config: PolicyConfig, transport: httpx2.AsyncBaseTransport | None = None):
        """`transport`: None for the network."""
        self._url = config.opa_url
        self._timeout_s = config.opa_timeout_s
        # Prompts go neither to a proxy of the environment nor to a redirect's target.
        self._http = httpx2.AsyncClient(
            timeout=config.opa_timeout_s,
            follow_redirects=False,
            trust_env=False,
            transport=transport,
        )

    async def ask(self, about: dict[str, Any]) -> Decision:
        """Return the decision about a call.

        Args:
            about: The policy's `input`.

        Raises:
            NoDecision: The agent can't be reached, is too slow, or its answer is malformed.
        """
        body = msgspec.json.encode({"input": about})
        headers = {"Content-Type": "application/json"}
        answer = b""
        try:
            with anyio.fail_after(self._timeout_s):
                asked = self._http.stream("POST", self._url, content=body, headers=headers)
                async with asked as response:
                    if response.status_code != 200:
                        raise NoDecision(f"status {response.status_code}")
                    async for piece in response.aiter_raw():
                        answer += piece
                        if len(answer) > MOST_BYTES:
                            raise NoDecision(f"an answer of more than {MOST_BYTES} bytes")
        except TimeoutError:
            raise NoDecision(f"no answer within {self._timeout_s} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise NoDecision(shown(f"{type(error).__name__}: {error}")) from None
        try:
            result = msgspec.json.decode(answer, type=_OpaResult).result
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NoDecision('an answer without {"result": true} or {"allow": …} in it') from None
        return result if isinstance(result, Decision) else Decision(result)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()
