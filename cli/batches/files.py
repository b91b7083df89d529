"""`nano-inference files`: the files of a server that batches read and write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.filesize import decimal

from ...config import ConfigError
from ..connection import run_with
from ..options import AsJson, Options, argument, group, option
from ..terminal import complain, date, harmless, print_json, print_table
from .calls import server_address
from .client import BatchClient
from .commands import takes_batch_options
from .journal import replaced

FileId = Annotated[str, argument("ID", "As `files list` shows it.")]


@group
def app() -> None:
    """List, upload, read and delete the files of a server, such as those of batches.

    nano-inference files list
    """


@app.command("list")
@takes_batch_options
def list_files(
    options: Options,
    purpose: Annotated[str, option("--purpose NAME", "Only these, as batch or batch_output.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the files of this key's tenant, newest first.

    nano-inference files list
    """
    only = f"&purpose={quote(purpose, safe='')}" if purpose else ""
    found = run_with(
        BatchClient(server_address(options)), lambda client: client.pages("files", only)
    )
    if as_json:
        print_json(*found)
        return
    rows = [
        (
            harmless(each["id"]),
            decimal(each["bytes"]),
            date(each["created_at"] * 10**9, seconds=False),
            harmless(each["filename"]),
        )
        for each in found
    ]
    columns = ("file", "size", "created", "name")
    print_table(columns, rows, "no files", right=("size",), fold=("name",))


@app.command()
@takes_batch_options
def upload(
    options: Options,
    file: Annotated[Path, argument("FILE", "Lines of calls, as OpenAI's batches have them.")],
    purpose: Annotated[str, option("--purpose NAME", "What it is for.")] = "batch",
    as_json: AsJson = False,
) -> None:
    """Upload a file, and print its id.

    nano-inference files upload calls.jsonl
    """
    try:
        opened = file.open("rb")
    except OSError as error:
        raise ConfigError(
            f"can't read {file}: {error.strerror}", remedy="give a readable file"
        ) from None
    with opened:
        found = run_with(
            BatchClient(server_address(options)),
            lambda client: client.upload(file.name, opened, purpose),
        )
    if as_json:
        print_json(found)
    else:
        typer.echo(harmless(found["id"]))


@app.command()
@takes_batch_options
def get(
    options: Options,
    file_id: FileId,
    out: Annotated[Path, argument("OUT", "Where it goes; default, and -: standard output.")] = Path(
        "-"
    ),
    as_json: Annotated[bool, option("--json", "Print its record, not its content.")] = False,
) -> None:
    """Write the content of a file.

    nano-inference files get file-5f0c1e

    nano-inference files get file-5f0c1e answers.jsonl
    """

    async def read(client: BatchClient) -> None:
        record = await client.file(file_id)
        if as_json:
            print_json(record)
        elif str(out) == "-":
            async for part in client.download(file_id):
                sys.stdout.buffer.write(part)
            sys.stdout.buffer.flush()
        else:
            with replaced(out.resolve()) as file:
                async for part in client.download(file_id):
                    file.write(part)

    run_with(BatchClient(server_address(options)), read)


@app.command()
@takes_batch_options
def delete(
    options: Options,
    file_ids: Annotated[list[str], argument("ID...", "As `files list` shows them.")],
    as_json: AsJson = False,
) -> None:
    """Delete files, which no running batch reads.

    nano-inference files delete file-5f0c1e
    """

    async def run(client: BatchClient) -> None:
        for each in file_ids:
            deleted: dict[str, Any] = await client.file(each, "DELETE")
            if as_json:
                print_json(deleted)
            else:
                complain(f"{harmless(each)} is deleted")

    run_with(BatchClient(server_address(options)), run)
