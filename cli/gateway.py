"""`nano-inference gateway`: HTTP in front of a running pipeline."""

from __future__ import annotations

import resource
import signal
from contextlib import suppress
from typing import Annotated

import anyio
import msgspec
import structlog
import typer

from ..config import Config
from ..gateway.gateway import DEFAULT_PORT, Gateway
from ..stages.temporary import sweep
from .connection import connected
from .options import ENGINE_OPTIONS, Options, WithParent, takes_options
from .process_memory import give_back_forever, spare_collector
from .run import forbid_torch, hear_parent

GatewayPort = Annotated[
    int | None,
    typer.Option(
        "--gateway",
        metavar="PORT",
        help="Serve HTTP on this port as well, from a process of its own.",
        show_default=False,
    ),
]


@takes_options(*ENGINE_OPTIONS)
def gateway(
    options: Options,
    port: Annotated[
        int | None,
        typer.Option(help=f"Where it listens; else gateway.port, else {DEFAULT_PORT}."),
    ] = None,
    with_parent: WithParent = False,
) -> None:
    """Serve HTTP in front of a running pipeline.

    It speaks what RL trainers expect of an SGLang server (docs/gateway.md):

        nano-inference gateway --bus redis://127.0.0.1:6379 --port 30000

        curl 127.0.0.1:30000/generate -d '{"text": "98 + 25 ="}' -H 'content-type: application/json'

    Give it the pipeline's model and settings, so that it can tell of them and has the tokenizer.
    Ctrl-C or SIGTERM ends it; requests in flight have a few seconds.
    """
    config = options.client_config(least=None)
    listening = port or config.gateway.port or DEFAULT_PORT
    own = msgspec.structs.replace(config.gateway, port=listening)
    config = msgspec.structs.replace(config, gateway=own)
    if not with_parent:  # which has done it
        sweep()
    forbid_torch()
    _raise_file_limit()
    anyio.run(_serve, config, with_parent)


def _raise_file_limit() -> None:
    """Lets this process have as many open files, and so connections, as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems say "unlimited" and do not mean it.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(config: Config, with_parent: bool) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with (
            # It may be started again while Redis is away; `up` has seen it before the first time.
            connected(
                config, name="gateway", wait_for_bus=with_parent, with_metrics=True
            ) as client,
            Gateway(client, config) as running,
            anyio.create_task_group() as group,
        ):
            spare_collector()
            structlog.get_logger().info("gateway_listens", url=running.url)
            group.start_soon(running.failed)
            group.start_soon(give_back_forever)
            if with_parent:
                group.start_soon(hear_parent, [], group.cancel_scope)
            await anext(signals)
            group.cancel_scope.cancel()
