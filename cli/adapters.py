"""`nano-inference adapters`: the LoRA adapters of a deployment, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ..bus.weights import InFlight
from ..pipeline.client import BusClient
from .connection import operate
from .options import Lane, Options, takes_model_options
from .terminal import stdout
from .weights import AtPause

app = typer.Typer(
    help="""List, load and unload LoRA adapters, while requests are in flight.

        nano-inference adapters load sql ./adapters/sql

        nano-inference adapters list

    Requests name an adapter in `model`. Of several models, --model says whose it is:

        nano-inference adapters load sql ./adapters/sql --model code

    docs/adapters.md has the rest.
    """,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Id = Annotated[str, typer.Argument(metavar="ID", help="By which requests name it.")]


@app.command("list")
@takes_model_options
def list_(options: Options, lane: Lane = None) -> None:
    """List the adapters that requests can name, of several models those of all, or of one.

    nano-inference adapters list
    """
    adapters = operate(lambda client: client.adapters(lane=lane), options)
    table = Table("id", "version", "rank", "MiB", "folder", box=None, pad_edge=False)
    for each in adapters:
        size = f"{each.num_bytes / (1 << 20):.1f}"
        table.add_row(each.id, str(each.version), str(each.rank), size, each.folder or "-")
    stdout().print(table if adapters else "no adapter is loaded")


@app.command()
@takes_model_options
def load(
    options: Options,
    id: Id,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="As PEFT's save_pretrained writes it, where executors can read."
        ),
    ],
    in_flight: AtPause = "keep",
    version: Annotated[
        int | None,
        typer.Option("--version", help="What to count from then on; the next when not given."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait until it is read.")
    ] = 300.0,
    lane: Lane = None,
) -> None:
    """Load an adapter, or give one that is loaded new weights; print its version.

    nano-inference adapters load sql ./adapters/sql
    """
    source = str(folder.absolute())

    async def work(client: BusClient) -> int:
        return await client.load_adapter(
            id, source, in_flight=in_flight, version=version, timeout_s=timeout_s, lane=lane
        )

    typer.echo(operate(work, options))


@app.command()
@takes_model_options
def unload(
    options: Options,
    id: Id,
    abort: Annotated[
        bool,
        typer.Option("--abort", help="End requests in flight that have it; else they finish."),
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds that requests may take to finish.")
    ] = 300.0,
    lane: Lane = None,
) -> None:
    """Forget an adapter. New requests that name it are refused at once.

    nano-inference adapters unload sql
    """

    async def work(client: BusClient) -> None:
        in_flight: InFlight = "abort" if abort else "keep"
        await client.unload_adapter(id, in_flight=in_flight, timeout_s=timeout_s, lane=lane)

    operate(work, options)
