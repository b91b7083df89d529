"""`nano-inference gateway`: HTTP and gRPC in front of a running pipeline."""

from __future__ import annotations

import signal
from typing import Annotated

import anyio
import msgspec
import typer

from ..config import Config
from ..config.logger import get_logger
from ..config.temporary import sweep
from ..gateway.gateway import DEFAULT_PORT, Gateway, check_ports
from .connection import connected
from .options import ENGINE_OPTIONS, Options, WithParent, takes_options
from .process import forbid_torch, raise_file_limit, until_told_to_stop
from .process_memory import spare_collector

MOST_PORT = 65_535

GatewayPort = Annotated[
    int | None,
    typer.Option(
        "--gateway",
        metavar="PORT",
        min=0,
        max=MOST_PORT,
        help="Serve HTTP on this port as well, from a process of its own.",
        show_default=False,
    ),
]

GrpcPort = Annotated[
    int | None,
    typer.Option(
        "--grpc-port",
        metavar="PORT",
        min=0,
        max=MOST_PORT,
        help="Serve KServe V2 over gRPC on this port as well; else gateway.grpc_port, else not.",
        show_default=False,
    ),
]

Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen on other addresses than this machine's own without keys.",
    ),
]


@takes_options(*ENGINE_OPTIONS)
def gateway(
    options: Options,
    port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=0,
            max=MOST_PORT,
            help=f"Where it listens; else gateway.port, else {DEFAULT_PORT}.",
        ),
    ] = None,
    grpc_port: GrpcPort = None,
    insecure: Insecure = False,
    with_parent: WithParent = False,
) -> None:
    """Serve HTTP in front of a running pipeline.

    It speaks what RL trainers expect of an SGLang server (docs/gateway.md):

        nano-inference gateway --bus redis://127.0.0.1:6379 --port 30000

        curl 127.0.0.1:30000/generate -d '{"text": "98 + 25 ="}' -H 'content-type: application/json'

    Give it the pipeline's model and settings, so that it can tell of them and has the tokenizer.
    On Ctrl-C or SIGTERM it is not ready any more and lets the calls under way end, within
    `pipeline.drain_timeout_s`; a second Ctrl-C ends it at once.
    """
    config = options.client_config(least=None)
    config = listening(config, port, DEFAULT_PORT, grpc_port=grpc_port, insecure=insecure)
    if not with_parent:  # which has done both
        check_ports(config, "--port", "--grpc-port")
        sweep()
    forbid_torch()
    raise_file_limit()
    anyio.run(_serve, config, with_parent)


def listening(
    config: Config,
    port: int | None,
    default: int,
    host: str | None = None,
    *,
    grpc_port: int | None = None,
    insecure: bool = False,
) -> Config:
    """The same settings with ports for the gateway: those given, else theirs, else, for HTTP, a
    default."""
    own = msgspec.structs.replace(
        config.gateway,
        port=port or config.gateway.port or default,
        grpc_port=config.gateway.grpc_port if grpc_port is None else grpc_port,
        host=host or config.gateway.host,
        insecure=insecure or config.gateway.insecure,
    )
    return msgspec.structs.replace(config, gateway=own)


async def _serve(config: Config, with_parent: bool) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with (
            # It may be started again while Redis is away; `up` has seen it before the first time.
            connected(
                config, name="gateway", wait_for_bus=with_parent, with_metrics=True
            ) as client,
            Gateway(client, config) as running,
        ):
            spare_collector()
            places = " and ".join(running.places.values())
            get_logger().info("gateway_listens", brief=f"listening at {places}", **running.places)
            told = await until_told_to_stop(signals, running.failed, with_parent=with_parent)
            # Without a parent there may be no bus any more.
            if told.asked is not None:
                await running.drain(config.pipeline.drain_timeout_s)
