"""`nano-inference kv-session`: the KV of a conversation between two turns."""

from __future__ import annotations

from typing import Annotated

import typer

from ..bus.public import DEFAULT_TENANT, SessionAction
from .connection import operate
from .options import AsJson, Lane, Options, argument, option, takes_model_options
from .terminal import print_json


@takes_model_options
def kv_session(
    options: Options,
    action: Annotated[SessionAction, argument("ACTION", "What to do with the KV.")],
    session: Annotated[str, argument("ID", "The session's id in requests.")],
    ttl_s: Annotated[
        float | None, option("--ttl SECONDS", "Time to live from now on; default: as before.")
    ] = None,
    tenant: Annotated[str, option("--tenant NAME", "The tenant of its requests.")] = DEFAULT_TENANT,
    as_json: AsJson = False,
    lane: Lane = None,
) -> None:
    """Pin, release, demote or prefetch the KV of a conversation; print what became of it.

    nano-inference kv-session prefetch agent-7 --ttl 60

    The exit status is 1 if it was rejected, or the session or its KV is missing.
    """
    result = operate(
        options,
        lambda client: client.kv_session(session, action, ttl_s=ttl_s, tenant=tenant, lane=lane),
    )
    if as_json:
        print_json(result)
    else:
        where = f" on the {result.tier}" if result.tier else ""
        why = f" ({result.reason})" if result.reason else ""
        typer.echo(f"{result.outcome}: {result.num_tokens} tokens{where}{why}")
    if result.outcome in ("rejected", "missing"):
        raise typer.Exit(1)
