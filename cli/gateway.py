"""`nano-inference gateway`: HTTP and gRPC in front of a running pipeline."""

from __future__ import annotations

import signal
from functools import partial
from typing import Annotated

import anyio
from msgspec.structs import replace

from ..config import Config
from ..config.logger import get_logger
from ..config.temporary import sweep
from ..gateway.gateway import DEFAULT_PORT, Gateway, check_ports
from .connection import connected
from .options import Options, WithParent, option, takes_gateway_options
from .process import forbid_torch, freeze_memory, raise_file_limit, until_stopped

MOST_PORT = 65_535

port_option = partial(option, metavar="PORT", min=0, max=MOST_PORT)

GrpcPort = Annotated[
    int | None, port_option("--grpc-port", "Serve KServe V2 over gRPC; default: gateway.grpc_port.")
]

Insecure = Annotated[
    bool, option("--insecure", "Listen on addresses of other machines without keys.")
]


@takes_gateway_options
def gateway(
    options: Options,
    port: Annotated[
        int | None,
        port_option("--port", f"Port for HTTP; default: gateway.port, or {DEFAULT_PORT}."),
    ] = None,
    grpc_port: GrpcPort = None,
    insecure: Insecure = False,
    with_parent: WithParent = False,
) -> None:
    """Serve HTTP in front of a running pipeline.

    It has the interface that RL trainers expect of an SGLang server (docs/gateway.md):

        nano-inference gateway --bus redis://127.0.0.1:6379 --port 30000

        curl 127.0.0.1:30000/generate -d '{"text": "98 + 25 ="}' -H 'content-type: application/json'

    Give it the pipeline's model and settings, for its metadata and the tokenizer. On Ctrl-C or
    SIGTERM it stops being ready and finishes calls in flight, within `pipeline.drain_timeout_s`; a
    second Ctrl-C ends it at once.
    """
    config = options.client_config(least=None)
    config = listening(config, port, DEFAULT_PORT, grpc_port=grpc_port, insecure=insecure)
    if not with_parent:  # the parent has done both
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
    """Return the settings with ports for the gateway: of options, else of settings, else, for
    HTTP, the default."""
    own = config.gateway
    own = replace(
        own,
        port=port or own.port or default,
        grpc_port=own.grpc_port if grpc_port is None else grpc_port,
        host=host or own.host,
        insecure=insecure or own.insecure,
    )
    return replace(config, gateway=own)


async def _serve(config: Config, with_parent: bool) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with (
            # It may be restarted while Redis is away; `up` has checked it before the first start.
            connected(
                config, name="gateway", wait_for_bus=with_parent, with_metrics=True
            ) as client,
            Gateway(client, config) as running,
        ):
            freeze_memory()
            places = " and ".join(running.places.values())
            get_logger().info("gateway_listens", brief=f"listening at {places}", **running.places)
            reason = await until_stopped(signals, running.failed, with_parent=with_parent)
            # Without a parent there may be no bus any more.
            if reason.signal is not None:
                await running.drain(config.pipeline.drain_timeout_s)
