"""`batch submit`, `list`, `status`, `cancel` and `results`: batches that a server runs."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from ...config import ConfigError, RequestError
from ..connection import run_with
from ..options import AsJson, Options, argument, option, takes
from ..requests import Template, template
from ..terminal import complain, date, harmless, one_line, print_json, print_table
from .calls import server_address
from .client import BatchClient
from .commands import Endpoint, IdColumn, In, Model, RowText, maker_of, takes_batch_options
from .commands import app as app
from .journal import replaced
from .lines import LineMaker
from .rows import JSON_LINES, format_of
from .run import bar

LOOK_S = 1.0
"""Period in which a batch's counts are read."""

_COUNTS = ("total", "completed", "failed")
_ENDED = ("completed", "failed", "expired", "cancelled")

BatchId = Annotated[str, argument("ID", "As `batch list` shows it.")]


@app.command()
@takes_batch_options
@takes(template)
def submit(
    options: Options,
    fields: Template,
    source: In,
    text: RowText = None,
    endpoint: Endpoint = None,
    model: Model = None,
    id_column: IdColumn = "custom_id",
    window: Annotated[str, option("--window TIME", "Its lines may run so long.")] = "24h",
) -> None:
    """Begin a batch of the server, which runs below all other calls, and print its id.

        nano-inference batch submit calls.jsonl

        nano-inference batch submit texts.csv --template "Translate: {text}" --window 7d

    Options and --template are those of `batch run`.
    """
    maker = maker_of(source, fields, text, endpoint, id_column)
    address = server_address(options)

    async def begin(client: BatchClient) -> str:
        maker.model = model or await client.check()
        with tempfile.TemporaryFile() as file:
            try:
                path = _write_calls(maker, file)
                file.seek(0)
            except OSError as error:
                folder = tempfile.gettempdir()
                why = f"can't write in {folder}: {error.strerror or error}"
                raise ConfigError(why, remedy="free space, or set TMPDIR") from None
            uploaded = await client.upload(f"{source.stem}.jsonl", file)
        body = {"input_file_id": uploaded["id"], "endpoint": path, "completion_window": window}
        return str((await client.batches(body=body))["id"])

    typer.echo(run_with(BatchClient(address), begin))


def _write_calls(maker: LineMaker, file: Any) -> str:
    """Write lines as OpenAI's batches have them; return the path that all call.

    Raises:
        ConfigError: A line can't be sent, or calls another path; or there is none.
    """
    path = ""
    for line in maker.lines():
        where = f"line {line.row.number}"
        if line.body is None:
            raise ConfigError(f"{where}: {line.fault}", remedy="correct the line, or remove it")
        path = path or line.url
        if line.url != path:
            raise ConfigError(
                f"{where} calls {line.url}, and the lines before it {path}",
                remedy="make a batch of each, or use `batch run`",
            )
        head = {"custom_id": line.id, "method": "POST", "url": line.url}
        file.write(msgspec.json.encode({**head, "body": msgspec.Raw(line.body)}) + b"\n")
    if not path:
        raise ConfigError("the input has no line", remedy="write one call, or one row, in each")
    return path


@app.command("list")
@takes_batch_options
def list_batches(options: Options, as_json: AsJson = False) -> None:
    """List the server's batches of this key's tenant, newest first.

    nano-inference batch list
    """

    found = run_with(BatchClient(server_address(options)), lambda client: client.pages("batches"))
    if as_json:
        print_json(*found)
        return
    rows = [
        (
            harmless(each["id"]),
            each["status"],
            f"{each['request_counts']['completed']}/{each['request_counts']['total']}",
            date(each["created_at"] * 10**9, seconds=False),
        )
        for each in found
    ]
    columns = ("batch", "status", "answered", "created")
    print_table(columns, rows, "no batches", right=("answered",), fold=("batch",))


@app.command()
@takes_batch_options
def status(options: Options, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Print the state of a batch.

    nano-inference batch status batch_4f0e8b1d
    """
    _show(_call(options, batch_id), as_json=as_json)


@app.command()
@takes_batch_options
def cancel(options: Options, batch_id: BatchId, as_json: AsJson = False) -> None:
    """Cancel a batch, which keeps the answers that it has.

    nano-inference batch cancel batch_4f0e8b1d
    """
    _show(_call(options, batch_id, "/cancel", {}), as_json=as_json)


@app.command()
@takes_batch_options
def results(
    options: Options,
    batch_id: BatchId,
    out: Annotated[Path, argument("OUT", "Lines of JSON (.jsonl).")],
    wait: Annotated[bool, option("--wait/--no-wait", "Wait for its end.")] = True,
) -> None:
    """Wait for the end of a batch, and write its answers and then its errors to a file.

        nano-inference batch results batch_4f0e8b1d answers.jsonl

    The same command goes on waiting after Ctrl-C. The exit status is 1 when any line has no answer.
    """
    if format_of(out, "OUT") not in JSON_LINES:
        raise ConfigError(f"OUT is {out}; it must be lines of JSON, as answers.jsonl")

    async def read(client: BatchClient) -> dict[str, Any]:
        with bar() as show:
            while (found := await client.batches(_path(batch_id)))["status"] not in _ENDED:
                counts = found["request_counts"]
                if not wait:
                    raise RequestError(
                        f"the batch is {found['status']}, {counts['completed']} of "
                        f"{counts['total']} lines are answered; leave out --no-wait",
                        code="batch_running",
                    )
                show(counts["completed"] + counts["failed"], counts["total"])
                await asyncio.sleep(LOOK_S)
        with replaced(out.resolve()) as file:
            for name in ("output_file_id", "error_file_id"):
                if file_id := found.get(name):
                    async for part in client.download(file_id):
                        file.write(part)
        return found

    found = run_with(BatchClient(server_address(options)), read)
    counts, faults = found["request_counts"], (found.get("errors") or {}).get("data") or ()
    for each in faults:
        where = f"line {each['line']}: " if each.get("line") else ""
        complain(f"{where}{each['message']} ({each['code']})")
    answered = f"{counts['completed']} of {counts['total']} lines are answered"
    complain(f"the batch is {found['status']}; {answered}: {out}")
    if found["status"] != "completed" or counts["completed"] < counts["total"]:
        raise typer.Exit(1)


def _call(options: Options, batch_id: str, path: str = "", body: Any = None) -> dict[str, Any]:
    client = BatchClient(server_address(options))
    return run_with(client, lambda client: client.batches(f"{_path(batch_id)}{path}", body))


def _path(batch_id: str) -> str:
    return f"/{quote(batch_id, safe='')}"


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    counts = found["request_counts"]
    facts = {
        "batch": found["id"],
        "status": found["status"],
        "lines": ", ".join(f"{counts[name]} {name}" for name in _COUNTS),
        "endpoint": found["endpoint"],
        **{
            name: date(found[f"{name}_at"] * 10**9)
            for name in ("created", "expires", *_ENDED)
            if found.get(f"{name}_at")
        },
    }
    for name, value in facts.items():
        typer.echo(f"{name:<10} {harmless(one_line(value))}")
    for each in (found.get("errors") or {}).get("data") or ():
        typer.echo(f"{'error':<10} {harmless(one_line(each['message']))} ({each['code']})")
