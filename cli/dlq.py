"""`nano-inference dlq`: requests that were given up, for somebody to look at."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, TypeVar

import msgspec
import typer
from rich.table import Table

from ..bus import Bus
from ..bus.dead_letters import DeadLetter
from ..config import Config, ConfigError
from ..pipeline.client import BusClient
from .connection import connected, find_served
from .options import Options, takes_model_options
from .terminal import complain, cut, harmless, one_line, stdout

T = TypeVar("T")

app = typer.Typer(
    help="""Look after the dead letters: requests that were given up.

    A request during which its lane fails time after time is answered with an error and kept here:

        nano-inference dlq list

        nano-inference dlq show 1795185430038-0

        nano-inference dlq retry 1795185430038-0

        nano-inference dlq drop --all
    """,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print lines of JSON.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID...", help="As `dlq list` shows them.")]
All = Annotated[bool, typer.Option("--all", help="All that are there now.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --all.")]


@app.command("list")
@takes_model_options
def list_letters(options: Options, as_json: AsJson = False) -> None:
    """Show all dead letters, oldest first.

    nano-inference dlq list
    """
    config = options.client_config()
    letters = asyncio.run(_letters(options, config))
    if as_json:
        for letter in letters:
            _print_json(letter)
    elif letters:
        stdout().print(_table(letters))
    else:
        typer.echo("no dead letters")


@app.command()
@takes_model_options
def show(
    options: Options,
    letter_id: Annotated[str, typer.Argument(metavar="ID", help="As `dlq list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Show one dead letter with its whole request.

    nano-inference dlq show 1795185430038-0
    """
    config = options.client_config()
    chosen = _chosen(asyncio.run(_letters(options, config)), [letter_id])
    if chosen is None:
        raise typer.Exit(1)
    (letter,) = chosen
    if as_json:
        _print_json(letter)
        return
    facts = {
        "letter": letter.letter_id,
        "request": letter.request.request_id or "(without an id of its own)",
        "entry": letter.entry_id,
        "model": letter.model or letter.request.model or "(the only one)",
        "given up": _when(letter.died_ns),
        "deaths": str(letter.deaths),
        "error": f"{letter.error.message} ({letter.error.code})",
        "trace": letter.traceparent or "none",
    }
    for name, value in facts.items():
        typer.echo(f"{name:<9} {harmless(one_line(value))}")
    request = msgspec.json.format(msgspec.json.encode(letter.request)).decode()
    typer.echo(harmless(request))


@app.command()
@takes_model_options
def retry(
    options: Options,
    ids: Ids = None,
    everything: All = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Publish the requests of dead letters again, and drop the letters.

    nano-inference dlq retry 1795185430038-0

    It is a new request in the old one's trace: its answer is under the id that is printed, since
    the old id may still have its old answer. Of several models it goes to the one that had it.
    """
    config = options.client_config()

    async def publish_again(client: BusClient, letter: DeadLetter) -> str:
        request = msgspec.structs.replace(letter.request, request_id="")
        async with _at(client, letter) as bus:
            entry_id = await bus.requests.publish(
                request, traceparent=letter.traceparent, tracestate=letter.tracestate
            )
        # Behind it: when this fails, the letter is there for another time.
        await client.bus.requests.drop_dead_letter(letter.letter_id)
        return entry_id

    for letter, entry_id in _act("retry", options, config, ids, publish_again, everything, yes):
        if as_json:
            line = {"letter_id": letter.letter_id, "request_id": entry_id}
            typer.echo(msgspec.json.encode(line).decode())
        else:
            typer.echo(f"{letter.letter_id} is published again; its answer is under {entry_id}")


@app.command()
@takes_model_options
def drop(
    options: Options,
    ids: Ids = None,
    everything: All = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove dead letters for good.

    nano-inference dlq drop 1795185430038-0
    """
    config = options.client_config()

    async def remove(client: BusClient, letter: DeadLetter) -> bool:
        return await client.bus.requests.drop_dead_letter(letter.letter_id)

    for letter, was_there in _act("drop", options, config, ids, remove, everything, yes):
        if as_json:
            line = {"letter_id": letter.letter_id, "dropped": was_there}
            typer.echo(msgspec.json.encode(line).decode())
        else:
            typer.echo(f"{letter.letter_id} is {'dropped' if was_there else 'gone already'}")


# --- inside ---------------------------------------------------------------------------------------


async def _letters(options: Options, config: Config) -> list[DeadLetter]:
    """Those of the model that is named; all when none is."""
    async with connected(config) as client:
        letters = await client.bus.requests.dead_letters()
        if options.served is None:
            return letters
        model = await find_served(client, options.served)
        return [letter for letter in letters if letter.model == model]


@asynccontextmanager
async def _at(client: BusClient, letter: DeadLetter) -> AsyncIterator[Bus]:
    """Where the request of a letter is published: at the model that had it."""
    if letter.model == client.bus.model:
        yield client.bus
        return
    async with client.of_model(letter.model) as of_model:
        yield of_model.bus


def _act(
    verb: str,
    options: Options,
    config: Config,
    ids: Sequence[str] | None,
    work: Callable[[BusClient, DeadLetter], Awaitable[T]],
    everything: bool,
    yes: bool,
) -> list[tuple[DeadLetter, T]]:
    """Does something to each of the letters, unless one of the ids is unknown."""
    if bool(ids) == everything:
        raise ConfigError(f"give the ids of letters to {verb}, or --all")
    letters = asyncio.run(_letters(options, config))
    chosen = letters if everything else _chosen(letters, ids or ())
    if chosen is None:
        raise typer.Exit(1)
    if everything and chosen and not yes:
        typer.confirm(f"{verb} {len(chosen)} dead letters?", abort=True, err=True)

    async def each() -> list[tuple[DeadLetter, T]]:
        async with connected(config) as client:
            return [(letter, await work(client, letter)) for letter in chosen]

    return asyncio.run(each())


def _chosen(letters: Sequence[DeadLetter], ids: Sequence[str]) -> list[DeadLetter] | None:
    """The letters with these ids; None when one is unknown, which it says."""
    by_id = {letter.letter_id: letter for letter in letters}
    unknown = [letter_id for letter_id in dict.fromkeys(ids) if letter_id not in by_id]
    for letter_id in unknown:
        complain(f"there is no dead letter {letter_id!r}; see `nano-inference dlq list`")
    return None if unknown else [by_id[letter_id] for letter_id in dict.fromkeys(ids)]


def _table(letters: Sequence[DeadLetter]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("letter", no_wrap=True)
    table.add_column("given up", no_wrap=True)
    table.add_column("deaths", justify="right")
    table.add_column("request", no_wrap=True)
    table.add_column("error", overflow="fold")
    for letter in letters:
        request_id = cut(one_line(letter.request.request_id or "-"), 16)
        table.add_row(
            letter.letter_id,
            _when(letter.died_ns),
            str(letter.deaths),
            request_id,
            letter.error.code,
        )
    return table


def _when(stamp_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp_ns / 1e9))


def _print_json(letter: DeadLetter) -> None:
    sys.stdout.write(f"{msgspec.json.encode(letter).decode()}\n")
