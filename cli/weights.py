"""A trainer's operations, by hand.

`nano-inference weights`, `adapters`, `pause`, `resume`, `flush-cache`, `release-memory` and
`resume-memory`.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..bus.control import MEMORY_TAGS, MemoryTag
from ..bus.weights import FolderWeights, InFlight
from .connection import operate
from .options import Lane, Options, argument, group, option, takes_model_options
from .terminal import harmless, print_table

app = group("""Read the version of the weights, and replace them while requests are in flight.

        nano-inference weights version

        nano-inference weights update --folder checkpoints/step-200

    docs/weights.md describes the requests in flight meanwhile, and how trainers do it.
    """)


class MemoryKind(StrEnum):
    """As `MemoryTag`; Typer takes no list of a Literal."""

    weights = "weights"
    kv_cache = "kv_cache"


Tags = Annotated[
    list[MemoryKind] | None, option("--tag", "A part of it. Repeatable; default: all.")
]
AtPause = Annotated[
    InFlight, option("--in-flight", "Requests keep their KV, recompute it, or end.")
]
Timeout = Annotated[float, option("--timeout", "Time limit, in seconds.", min=0)]
Version = Annotated[int | None, option("--version", "The new version; default: the next one.")]


@app.command()
@takes_model_options
def update(
    options: Options,
    folder: Annotated[Path, option("--folder FOLDER", "Checkpoint that the executor can read.")],
    in_flight: AtPause = "keep",
    version: Version = None,
    partial: Annotated[bool, option("--partial", "Keep parameters that the folder lacks.")] = False,
    timeout_s: Timeout = 300.0,
    lane: Lane = None,
) -> None:
    """Replace the weights by those of a folder; print their version.

    nano-inference weights update --folder checkpoints/step-200 --in-flight retract
    """
    source = FolderWeights(str(folder.absolute()))
    new_version = operate(
        options,
        lambda client: client.update_weights(
            source,
            in_flight=in_flight,
            version=version,
            partial=partial,
            timeout_s=timeout_s,
            lane=lane,
        ),
        "updating the weights",
    )
    typer.echo(new_version)


@app.command("version")
@takes_model_options
def version_(options: Options, lane: Lane = None) -> None:
    """Print the version of the weights in place; 0 after loading.

    nano-inference weights version
    """
    typer.echo(operate(options, lambda client: client.weight_version(lane=lane)))


@takes_model_options
def pause(options: Options, in_flight: AtPause = "keep", lane: Lane = None) -> None:
    """Pause generation, and return after the current step; requests wait until `resume`.

    nano-inference pause --in-flight retract
    """
    operate(options, lambda client: client.pause(in_flight, lane=lane))


@takes_model_options
def resume(options: Options, lane: Lane = None) -> None:
    """Resume generation after `pause`.

    nano-inference resume
    """
    operate(options, lambda client: client.resume(lane=lane))


@takes_model_options
def flush_cache(options: Options, lane: Lane = None) -> None:
    """Empty the prefix cache and the response cache. New weights need no flush.

    nano-inference flush-cache
    """
    operate(options, lambda client: client.flush_cache(lane=lane))


@takes_model_options
def release_memory(options: Options, tags: Tags = None, lane: Lane = None) -> None:
    """Release memory of the device; requests wait until `resume-memory`.

    Released weights are lost: after `resume-memory`, all of them must be sent.

    nano-inference release-memory --tag kv_cache
    """
    operate(options, lambda client: client.release_memory(_memory(tags), lane=lane))


@takes_model_options
def resume_memory(options: Options, tags: Tags = None, lane: Lane = None) -> None:
    """Allocate released memory again.

    nano-inference resume-memory --tag weights
    """
    operate(options, lambda client: client.resume_memory(_memory(tags), lane=lane))


def _memory(tags: list[MemoryKind] | None) -> tuple[MemoryTag, ...]:
    return tuple(tag.value for tag in tags) if tags else MEMORY_TAGS


# --- adapters -------------------------------------------------------------------------------------


adapters = group("""List, load and unload LoRA adapters, while requests are in flight.

        nano-inference adapters load sql ./adapters/sql

        nano-inference adapters list

    Requests name an adapter in `model`. With several models, --model names the adapter's:

        nano-inference adapters load sql ./adapters/sql --model code

    See docs/adapters.md.
    """)

Id = Annotated[str, argument("ID", "Its name in requests.")]


@adapters.command("list")
@takes_model_options
def list_adapters(options: Options, lane: Lane = None) -> None:
    """List the adapters that requests can name, of all models or of one.

    nano-inference adapters list
    """
    found = operate(options, lambda client: client.adapters(lane=lane))
    rows = []
    for each in found:
        size = f"{each.num_bytes / (1 << 20):.1f}"
        rows.append((each.id, f"{each.version}", f"{each.rank}", size, each.folder or "-"))
    names = ("id", "version", "rank", "MiB", "folder")
    print_table(names, rows, "no adapter is loaded", fold=("folder",))


@adapters.command("load")
@takes_model_options
def load_adapter(
    options: Options,
    id: Id,
    folder: Annotated[Path, argument("FOLDER", "A folder of PEFT that executors can read.")],
    in_flight: AtPause = "keep",
    version: Version = None,
    timeout_s: Timeout = 300.0,
    lane: Lane = None,
) -> None:
    """Load an adapter, or new weights for one that is loaded; print its version.

    nano-inference adapters load sql ./adapters/sql
    """
    source = str(folder.absolute())
    new_version = operate(
        options,
        lambda client: client.load_adapter(
            id, source, in_flight=in_flight, version=version, timeout_s=timeout_s, lane=lane
        ),
        f"loading {harmless(id)}",
    )
    typer.echo(new_version)


@adapters.command("unload")
@takes_model_options
def unload_adapter(
    options: Options,
    id: Id,
    abort: Annotated[bool, option("--abort", "End its requests; default: finish.")] = False,
    timeout_s: Timeout = 300.0,
    lane: Lane = None,
) -> None:
    """Unload an adapter. New requests for it are refused at once.

    nano-inference adapters unload sql
    """
    operate(
        options,
        lambda client: client.unload_adapter(
            id, in_flight="abort" if abort else "keep", timeout_s=timeout_s, lane=lane
        ),
    )
