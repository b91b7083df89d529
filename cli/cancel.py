"""`nano-inference cancel`: end a request that is in flight."""

from __future__ import annotations

from typing import Annotated

import anyio

from ..bus.public import Completion
from ..config import ConfigError, RequestError, shown
from .clients import Client, client_at
from .connection import run_with, target_of
from .options import Options, argument, takes_server_options
from .terminal import failures_exit

_LOOKS_S = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5)
"""Pauses before looks for the end of a cancelled request."""

_UNKNOWN = "unknown_request"


@takes_server_options
def cancel(
    options: Options,
    request_id: Annotated[str, argument("ID", "The request's id, or that of its answer.")],
) -> None:
    """Cancel a request that is in flight. Its client gets the answer so far.

        nano-inference cancel chatcmpl-6c57ddeed9564f79a77b142870c43455

        nano-inference cancel 1795185430038-0 --bus redis://127.0.0.1:6390

    The exit status is 0 when the request has ended by it, and 1 when the id is unknown or its
    request had ended before. With a server's key without the scope `admin`, which can't see that,
    it is 0 when the server has received the cancellation.
    """
    if not request_id:
        raise ConfigError("give the id of a request")
    target = target_of(options, or_serve=True)
    with failures_exit():
        run_with(client_at(target), lambda client: _cancel(client, request_id))


async def _cancel(client: Client, request_id: str) -> None:
    """Raises RequestError: `unknown_request`: nothing ended by it."""
    before = await _ended(client, request_id)
    await client.cancel(request_id)
    if before is None:
        return
    for pause_s in _LOOKS_S[: 2 if before else None]:
        await anyio.sleep(pause_s)
        if await _ended(client, request_id) != before:
            return
    if before:
        raise RequestError(
            f"{shown(request_id)} had ended before ({before[0].status}), and nothing was cancelled",
            code=_UNKNOWN,
            remedy="see its answer with `nano-inference trace` or the console",
        )
    raise RequestError(
        f"no request {shown(request_id)} is in flight here, and nothing was cancelled",
        code=_UNKNOWN,
        remedy="give the id of a request or of its answer, as `nano-inference submit --json` and "
        "the console show it",
    )


async def _ended(client: Client, request_id: str) -> list[Completion] | None:
    """Return the ends of the request; None if this client may not read them."""
    try:
        found: list[Completion] = await client.operate("recorded", {"id": request_id})
    except RequestError as error:
        return [] if error.code == _UNKNOWN else None
    return found
