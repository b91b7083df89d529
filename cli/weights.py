"""`nano-inference weights`, `pause`, `resume`, `flush-cache`, `release-memory`, `resume-memory`.

What a trainer does, by hand.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..bus.control import MEMORY_TAGS, MemoryTag
from ..bus.weights import FolderWeights, InFlight
from ..pipeline.client import BusClient
from .connection import operate
from .options import Lane, Options, takes_model_options

app = typer.Typer(
    help="""Look at the weights in place, and replace them while requests are in flight.

        nano-inference weights version

        nano-inference weights update --folder checkpoints/step-200

    docs/weights.md says what happens meanwhile, and how trainers do it.
    """,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class MemoryKind(StrEnum):
    """As `bus.control.MemoryTag`."""

    weights = "weights"
    kv_cache = "kv_cache"


Tags = Annotated[
    list[MemoryKind] | None,
    typer.Option("--tag", help="What of the memory, also several times; all when not given."),
]

AtPause = Annotated[
    InFlight,
    typer.Option(
        "--in-flight",
        help="What becomes of requests in flight: they keep their KV, compute it again, or end "
        "with what they have.",
    ),
]


@app.command()
@takes_model_options
def update(
    options: Options,
    folder: Annotated[
        Path,
        typer.Option(
            "--folder",
            metavar="FOLDER",
            help="Checkpoint in Transformers' format, or a safetensors file, where the executor "
            "can read it.",
        ),
    ],
    in_flight: AtPause = "keep",
    version: Annotated[
        int | None,
        typer.Option("--version", help="What to count from then on; the next when not given."),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Parameters that are not there stay as they are."),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait for the new weights.")
    ] = 300.0,
    lane: Lane = None,
) -> None:
    """Replace the weights by those of a folder; print the version that they have.

    nano-inference weights update --folder checkpoints/step-200 --in-flight retract
    """
    source = FolderWeights(str(folder.absolute()))

    async def replace(client: BusClient) -> int:
        return await client.update_weights(
            source,
            in_flight=in_flight,
            version=version,
            partial=partial,
            timeout_s=timeout_s,
            lane=lane,
        )

    typer.echo(operate(replace, options))


@app.command("version")
@takes_model_options
def version_(options: Options, lane: Lane = None) -> None:
    """Print the version of the weights in place; 0 are those that were loaded.

    nano-inference weights version
    """
    typer.echo(operate(partial(BusClient.weight_version, lane=lane), options))


@takes_model_options
def pause(options: Options, in_flight: AtPause = "keep", lane: Lane = None) -> None:
    """Stop generating, and return when no step is under way; requests wait until `resume`.

    nano-inference pause --in-flight retract
    """

    async def stop(client: BusClient) -> None:
        await client.pause(in_flight, lane=lane)

    operate(stop, options)


@takes_model_options
def resume(options: Options, lane: Lane = None) -> None:
    """Go on generating after `pause`.

    nano-inference resume
    """
    operate(partial(BusClient.resume, lane=lane), options)


@takes_model_options
def flush_cache(options: Options, lane: Lane = None) -> None:
    """Forget all cached prefixes. New weights need no flush.

    nano-inference flush-cache
    """
    operate(partial(BusClient.flush_cache, lane=lane), options)


@takes_model_options
def release_memory(options: Options, tags: Tags = None, lane: Lane = None) -> None:
    """Give memory back to the device; requests wait until `resume-memory`.

    Released weights are lost: after `resume-memory` they must be sent, all of them.

    nano-inference release-memory --tag kv_cache
    """

    async def release(client: BusClient) -> None:
        await client.release_memory(_memory(tags), lane=lane)

    operate(release, options)


@takes_model_options
def resume_memory(options: Options, tags: Tags = None, lane: Lane = None) -> None:
    """Take memory again that was released.

    nano-inference resume-memory --tag weights
    """

    async def take(client: BusClient) -> None:
        await client.resume_memory(_memory(tags), lane=lane)

    operate(take, options)


def _memory(tags: list[MemoryKind] | None) -> tuple[MemoryTag, ...]:
    return tuple(tag.value for tag in tags) if tags else MEMORY_TAGS
