"""`nano-inference batch`: run a file of calls, and a server's own batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from ...config import ConfigError
from ..options import Options, argument, group, option, takes
from ..requests import Template, field, template, text_or_file
from ..terminal import complain
from .calls import at_server, in_process
from .journal import Journal
from .lines import LineMaker
from .rows import JSON_LINES, format_of
from .run import answer_all
from .tables import AnswerTable

takes_batch_options = takes(Options, "url", "api_key", "config_file", "settings", "log_level")


@group
def app() -> None:
    """Answer a file of calls, here or as a batch of a server.

    nano-inference batch run calls.jsonl answers.jsonl
    """


In = Annotated[Path, argument("IN", "Lines of JSON (.jsonl), CSV or Parquet.")]
Model = Annotated[
    str | None, field("--model NAME", "The model of calls that name none; with --local a folder.")
]
RowText = Annotated[
    str | None,
    field("--template TEXT", 'As "Translate {text}", or a JSON body with {columns}; or @FILE.'),
]
Endpoint = Annotated[
    str | None, field("--endpoint PATH", "What templates call; default: /v1/chat/completions.")
]
IdColumn = Annotated[str, field("--id COLUMN", "The column of ids; without it, row numbers.")]


@app.command()
@takes_batch_options
@takes(template)
def run(
    options: Options,
    fields: Template,
    source: In,
    out: Annotated[Path, argument("OUT", "Lines of JSON (.jsonl), CSV or Parquet.")],
    text: RowText = None,
    endpoint: Endpoint = None,
    model: Model = None,
    local: Annotated[bool, option("--local", "An engine in this process, no server.")] = False,
    id_column: IdColumn = "custom_id",
    answer: Annotated[str, option("--answer NAME", "The column of answers in OUT.")] = "answer",
    concurrent: Annotated[
        int | None, option("--concurrency NUMBER", "Calls at once; default: 256.", min=1)
    ] = None,
    again: Annotated[bool, option("--again", "Send lines anew whose answer is an error.")] = False,
) -> None:
    """Answer each line of a file into another file; the same command goes on after an interruption.

        nano-inference batch run calls.jsonl answers.jsonl

        nano-inference batch run texts.csv translated.csv --template "Translate: {text}"

        nano-inference batch run rows.parquet out.parquet --template @body.json --local --model tiny

        nano-inference batch run calls.jsonl answers.jsonl --url https://api.example.com/v1

    A line is a call as in OpenAI's batches, `{"custom_id", "url", "body"}`, a body alone, or a row
    with columns for --template. What OUT has already is not sent again. With CSV or Parquet the
    whole answers are in OUT.jsonl beside OUT.

    The exit status is 1 when any answer is an error.
    """
    kind = format_of(out, "OUT")
    if out.exists() and out.samefile(source):
        raise ConfigError("IN and OUT are the same file", remedy="name another OUT")
    maker = maker_of(source, fields, text, endpoint, id_column)
    table, path = None, out.resolve()
    if kind not in JSON_LINES:
        path = path.with_name(f"{path.name}.jsonl")
        if out.exists() and not path.exists():
            raise ConfigError(
                f"{out} exists, and {path.name} with its answers does not",
                remedy="write to another file, or delete this one",
            )
        table = AnswerTable(source, out.resolve(), answer)
    place = (in_process if local else at_server)(
        replace(options, served=model), fields.get("tenant")
    )
    with Journal(path) as journal:
        counts = asyncio.run(answer_all(maker, journal, place, concurrent, again=again))
        journal.sort(line.id for line in maker.lines())
        if table is not None:
            table.write(maker.lines(), journal)
    complain(f"{counts.summary}: {out}")
    if counts.failed:
        raise typer.Exit(1)


def maker_of(
    source: Path, fields: Template, text: str | None, endpoint: str | None, id_column: str
) -> LineMaker:
    """Return what makes the lines of a file. Raises ConfigError: an option is invalid."""
    for name in ("max_version_lag", "on_version_lag"):
        if name in fields:
            raise ConfigError(f"--{name.replace('_', '-')} is for `submit`, over a bus")
    return LineMaker(
        source,
        fields,
        template=None if text is None else text_or_file("--template", text),
        endpoint=endpoint,
        id_column=id_column,
    )
