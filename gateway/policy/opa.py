"""What an Open Policy Agent says of a call."""

from __future__ import annotations

from typing import Any

import anyio
import httpx2
import msgspec

from ...config import PolicyConfig, shown

MOST_BYTES = 64 << 10
"""Of its answer."""


class Decision(msgspec.Struct, frozen=True):
    """What it decided.

    Attributes:
        reason: Why it refuses, in its own words; "" when it says nothing.
    """

    allow: bool
    reason: str = ""


class _Answer(msgspec.Struct, frozen=True):
    result: bool | Decision


class NoDecision(Exception):
    """It has not decided. The message says why."""


class OpenPolicyAgent:
    """Asks one over its REST API (`POST /v1/data/<policy>`).

    The answer is `{"result": true}`, or `{"result": {"allow": false, "reason": "…"}}`. Whatever
    else it is, or when none comes in time, nothing was decided: an undefined policy answers `{}`.
    """

    def __init__(self, config: PolicyConfig, transport: httpx2.AsyncBaseTransport | None = None):
        """Args: `transport` reaches it; None is the network."""
        self._url = config.opa_url
        self._timeout_s = config.opa_timeout_s
        # Neither a proxy of the environment nor a redirect sees what is asked.
        self._http = httpx2.AsyncClient(
            timeout=config.opa_timeout_s,
            follow_redirects=False,
            trust_env=False,
            transport=transport,
        )

    async def ask(self, about: dict[str, Any]) -> Decision:
        """Asks about a call.

        Args:
            about: The policy's `input`.

        Raises:
            NoDecision: It can't be reached, is too slow, or its answer is none.
        """
        try:
            with anyio.fail_after(self._timeout_s):
                return _decision(await self._answer(msgspec.json.encode({"input": about})))
        except TimeoutError:
            raise NoDecision(f"no answer within {self._timeout_s} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise NoDecision(shown(f"{type(error).__name__}: {error}")) from None

    async def aclose(self) -> None:
        """Closes its connections."""
        await self._http.aclose()

    async def _answer(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        asked = self._http.stream("POST", self._url, content=body, headers=headers)
        async with asked as response:
            if response.status_code != 200:
                raise NoDecision(f"status {response.status_code}")
            answer = b""
            async for piece in response.aiter_raw():
                answer += piece
                if len(answer) > MOST_BYTES:
                    raise NoDecision(f"an answer of more than {MOST_BYTES} bytes")
            return answer


def _decision(answer: bytes) -> Decision:
    try:
        result = msgspec.json.decode(answer, type=_Answer).result
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise NoDecision('an answer without {"result": true} or {"allow": …} in it') from None
    return result if isinstance(result, Decision) else Decision(result)
