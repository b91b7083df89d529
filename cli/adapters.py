"""`nano-inference adapters`: the LoRA adapters of a deployment, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .connection import operate
from .options import Lane, Options, argument, group, option, takes_model_options
from .terminal import stdout, table
from .weights import AtPause, Version

app = group("""List, load and unload LoRA adapters, while requests are in flight.

        nano-inference adapters load sql ./adapters/sql

        nano-inference adapters list

    Requests name an adapter in `model`. With several models, --model names the adapter's:

        nano-inference adapters load sql ./adapters/sql --model code

    See docs/adapters.md.
    """)

Id = Annotated[str, argument("ID", "Its name in requests.")]


@app.command("list")
@takes_model_options
def list_(options: Options, lane: Lane = None) -> None:
    """List the adapters that requests can name, of all models or of one.

    nano-inference adapters list
    """
    adapters = operate(options, lambda client: client.adapters(lane=lane))
    made = table("id", "version", "rank", "MiB", "folder", fold=("folder",))
    for each in adapters:
        size = f"{each.num_bytes / (1 << 20):.1f}"
        made.add_row(each.id, str(each.version), str(each.rank), size, each.folder or "-")
    stdout().print(made if adapters else "no adapter is loaded")


@app.command()
@takes_model_options
def load(
    options: Options,
    id: Id,
    folder: Annotated[
        Path, argument("FOLDER", "Written by PEFT's save_pretrained, where executors can read it.")
    ],
    in_flight: AtPause = "keep",
    version: Version = None,
    timeout_s: Annotated[
        float, option("--timeout", "Seconds to wait for the adapter.", min=0)
    ] = 300.0,
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
    )
    typer.echo(new_version)


@app.command()
@takes_model_options
def unload(
    options: Options,
    id: Id,
    abort: Annotated[
        bool, option("--abort", "End its requests in flight; default: they finish.")
    ] = False,
    timeout_s: Annotated[
        float, option("--timeout", "Time limit for its requests, in seconds.", min=0)
    ] = 300.0,
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
