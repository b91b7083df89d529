"""`nano-inference serve` and `gateway`: HTTP and gRPC, for a pipeline in this process or not."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import anyio
import typer
from msgspec.structs import replace

from ..config import STAGES, Config, ConfigError, redact, shown
from ..config.logger import get_logger
from ..config.temporary import sweep
from ..gateway.gateway import DEFAULT_PORT, Gateway, check_ports
from ..pipeline.pipeline import Pipeline
from ..store.board import StageReport
from ..telemetry import LogOutput, setup_logging
from ..telemetry.logs import are_json
from .connection import SERVE_PORT, connected
from .model_files import check_model_files
from .options import Options, WithParent, option, takes_engine_options, takes_gateway_options
from .process import (
    drain,
    ending_at_once,
    forbid_torch,
    freeze_memory,
    import_tokenizers,
    raise_file_limit,
    stop_signals,
    until_stopped,
)
from .pull import with_pulled
from .requests import given
from .running import record, registered
from .terminal import Complaints, show_loading, stderr

MOST_PORT = 65_535

port_option = partial(option, min=0, max=MOST_PORT)

GrpcPort = Annotated[
    int | None, port_option("--grpc-port PORT", "For KServe V2; default: gateway.grpc_port.")
]

Insecure = Annotated[bool, option("--insecure", "Listen for other machines without keys.")]

# `announce` prints these to standard output.
_SAID = ("gateway_listens", "ready")


@takes_engine_options
def serve(
    options: Options,
    folder: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        port_option(
            "--port PORT", f"For HTTP, 0 for a free one; default: gateway.port, or {SERVE_PORT}."
        ),
    ] = None,
    host: Annotated[str | None, option("--host ADDRESS", "Default: gateway.host.")] = None,
    grpc_port: GrpcPort = None,
    insecure: Insecure = False,
) -> None:
    """Serve a model over HTTP, all in this process.

    Five stages, an in-memory bus and the gateway, without another server:

        nano-inference serve

        nano-inference serve ~/models/Qwen2.5-0.5B-Instruct --port 8000

        nano-inference serve Qwen/Qwen2.5-0.5B-Instruct        (which `pull` has brought)

    It has OpenAI's interface (docs/openai.md), SGLang's (docs/gateway.md) and Triton's
    (docs/kserve.md), with --grpc-port also over gRPC. Without keys (docs/policy.md), every client
    that reaches the port may use all of it, so it listens on this machine only.

    On Ctrl-C, SIGTERM or SIGHUP it stops being ready and finishes requests in flight, within
    `pipeline.drain_timeout_s`; a second Ctrl-C ends it at once. With --bus requests go over Redis,
    and a successor of this process continues them.
    """
    if folder is not None:
        if options.model not in (None, folder):
            raise ConfigError(f"give {shown(folder)} or --model {shown(options.model)}, not both")
        options = replace(options, model=folder)
    options = with_pulled(options)
    config = options.config(**{"pipeline.stages": list(STAGES)})
    check_model_files(config, options.model)
    config = listening(config, port, SERVE_PORT, host, grpc_port=grpc_port, insecure=insecure)
    check_ports(config, "--port", "--grpc-port")
    setup_logging(config.telemetry, said=_SAID)
    sweep()
    raise_file_limit()
    Complaints.as_json = are_json(config.telemetry)
    anyio.run(_serve, config)


async def _serve(config: Config) -> None:
    with ExitStack() as until_the_end, ExitStack() as until_ready:
        # Until it is ready there is nothing to drain, and signals end it.
        until_ready.enter_context(ending_at_once())
        async with (
            # It listens while the model is being loaded: probes are answered, and requests wait.
            Pipeline(
                config, wait_until_ready=False, with_metrics=config.gateway.metrics
            ) as pipeline,
            Gateway(pipeline.client, config) as gateway,
        ):
            get_logger().info("gateway_listens", **gateway.places)
            until_the_end.enter_context(registered(record("serve", config, gateway.url)))
            async with anyio.create_task_group() as group:
                replicas = config.pipeline.replicas
                reports = partial(_reports, pipeline)
                group.start_soon(show_loading, reports, replicas, stderr())
                await pipeline.ready()
                group.cancel_scope.cancel()
            until_ready.close()
            gateway.warm_up()
            signals = until_the_end.enter_context(stop_signals())
            freeze_memory()
            announce(config, gateway.url, gateway.places.get("grpc"))
            await until_stopped(signals, pipeline.failed, gateway.failed)
            end_s = time.monotonic() + config.pipeline.drain_timeout_s
            await gateway.drain(config.pipeline.drain_timeout_s)
            # Remaining requests end with an error, which the gateway still sends.
            await drain(pipeline, max(0.0, end_s - time.monotonic()))


async def _reports(pipeline: Pipeline) -> list[StageReport]:
    return pipeline.stages()


def announce(config: Config, url: str | None, grpc: str | None = None) -> None:
    """Print the addresses of a pipeline that is ready, and what to try; or log the addresses, if
    the log is JSON and standard output no terminal.

    Args:
        config: Its settings.
        url: The root of its HTTP interfaces; None without HTTP.
        grpc: The address of gRPC; None without gRPC.
    """
    if Complaints.as_json and (config.telemetry.log_format == "json" or not sys.stdout.isatty()):
        ids = [each.id for each in config.models] or [config.engine.model_name]
        places = {"url": url, "grpc": grpc, "bus": None if url else redact(config.bus.url)}
        get_logger().info("serving", models=ids, **given(places))
        return
    names = " and ".join(repr(each.id) for each in config.models) or repr(config.engine.model_name)
    served = f"{names} {'are' if len(config.models) > 1 else 'is'} served"
    if url is None:
        text = (
            f"{served} over {redact(config.bus.url)}. Try it in another terminal:\n\n"
            '  nano-inference submit "98 + 25 ="\n\n'
            "  nano-inference top\n\n"
            f"--gateway {SERVE_PORT} serves it over HTTP, too.\n\n"
        )
    else:
        with_key = config.policy.knows_callers
        key = ' -H "Authorization: Bearer $NANO_INFERENCE_API_KEY"' if with_key else ""
        body = {"model": config.models[0].id} if config.models else {}
        asked = json.dumps(body | {"prompt": "98 + 25 =", "temperature": 0})
        console = f"  {url}/console/ in a browser\n\n" if config.gateway.console else ""
        text = (
            f"{served} at {url}, OpenAI's interface at {url}/v1"
            f"{f', KServe V2 over gRPC at {grpc}' if grpc else ''}. Try it:\n\n"
            f"  curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{asked}'\n\n"
            f"  nano-inference chat --url {url}\n\n"
            f"{console}"
        )
    # The pipe may be closed, or the disk full.
    LogOutput(sys.stdout, lambda lines: "").write(text)


# --- gateway --------------------------------------------------------------------------------------


@takes_gateway_options
def gateway(
    options: Options,
    port: Annotated[
        int | None,
        port_option(
            "--port PORT", f"For HTTP, 0 for a free one; default: gateway.port, or {DEFAULT_PORT}."
        ),
    ] = None,
    grpc_port: GrpcPort = None,
    insecure: Insecure = False,
    with_parent: WithParent = False,
) -> None:
    """Serve HTTP in front of a running pipeline.

    It has the interface that RL trainers expect of an SGLang server (docs/gateway.md):

        nano-inference gateway --bus redis://127.0.0.1:6379

        curl 127.0.0.1:8000/generate -d '{"text": "98 + 25 ="}' -H 'content-type: application/json'

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
    import_tokenizers()
    raise_file_limit()
    Complaints.as_json = not with_parent and are_json(config.telemetry)
    anyio.run(_serve_gateway, config, with_parent)


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
    HTTP, the default. Port 0 of an option is a free one."""
    fields = {"host": host, "grpc_port": grpc_port, "insecure": insecure or None}
    fields["port"] = (config.gateway.port or default) if port is None else port
    return replace(config, gateway=replace(config.gateway, **given(fields)))


async def _serve_gateway(config: Config, with_parent: bool) -> None:
    with stop_signals() as signals, ExitStack() as until_the_end:
        async with (
            # It may be restarted while Redis is away; `up` has checked it before the first start.
            connected(
                config, name="gateway", wait_for_bus=with_parent, with_metrics=True
            ) as client,
            Gateway(client, config) as running,
        ):
            if not with_parent:
                until_the_end.enter_context(registered(record("gateway", config, running.url)))
            freeze_memory()
            places = " and ".join(running.places.values())
            get_logger().info("gateway_listens", brief=f"listening at {places}", **running.places)
            running.warm_up()
            reason = await until_stopped(signals, running.failed, with_parent=with_parent)
            # Without a parent there may be no bus any more.
            if reason.signal is not None:
                await running.drain(config.pipeline.drain_timeout_s)
