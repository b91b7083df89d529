"""`nano-inference dlq`: the dead letters, requests that failed repeatedly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
import typer
from msgspec.structs import replace

from ..bus.dead_letters import DeadLetter
from ..config import ConfigError
from ..pipeline.client import BusClient
from ..pipeline.dead_letters import retry_dead_letter
from .connection import find_served, operate
from .options import AsJson, Options, argument, group, option, takes_model_options
from .terminal import complain, cut, date, harmless, one_line, print_json, print_table

T = TypeVar("T")

app = group("""List, repeat and remove dead letters: requests that failed repeatedly.

    A request whose lane fails each time is answered with an error and kept here:

        nano-inference dlq list

        nano-inference dlq show 1795185430038-0

        nano-inference dlq retry 1795185430038-0

        nano-inference dlq drop --all
    """)

Ids = Annotated[list[str] | None, argument("ID...", "As `dlq list` shows them.")]
All = Annotated[bool, option("--all", "All dead letters.")]
Yes = Annotated[bool, option("--yes -y", "Confirm --all.")]


@app.command("list")
@takes_model_options
def list_letters(options: Options, as_json: AsJson = False) -> None:
    """Print all dead letters, oldest first.

    nano-inference dlq list
    """
    letters = _letters(options)
    if as_json:
        print_json(*letters)
        return
    rows = []
    for letter in letters:
        request_id = cut(one_line(letter.request.request_id or "-"), 16)
        facts = (date(letter.died_ns), str(letter.deaths), request_id, letter.error.code)
        rows.append((letter.letter_id, *facts))
    names = ("letter", "given up", "deaths", "request", "error")
    print_table(names, rows, "no dead letters", right=("deaths",), fold=("error",))


@app.command()
@takes_model_options
def show(
    options: Options,
    letter_id: Annotated[str, argument("ID", "As `dlq list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Print one dead letter with its whole request.

    nano-inference dlq show 1795185430038-0
    """
    (letter,) = _chosen(_letters(options), [letter_id])
    if as_json:
        print_json(letter)
        return
    facts = {
        "letter": letter.letter_id,
        "request": letter.request.request_id or "(without an id of its own)",
        "entry": letter.entry_id,
        "model": letter.model or letter.request.model or "(the only one)",
        "given up": date(letter.died_ns),
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
    """Publish the requests of dead letters again, and remove the letters.

    nano-inference dlq retry 1795185430038-0

    It is a new request in the old trace: its answer is under the id that is printed, since the old
    id may still have its old answer. With several models it goes to the same model.
    """

    for letter, entry_id in _act("retry", options, ids, retry_dead_letter, everything, yes):
        if as_json:
            print_json({"letter_id": letter.letter_id, "request_id": entry_id})
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
    """Remove dead letters.

    nano-inference dlq drop 1795185430038-0
    """

    async def remove(client: BusClient, letter: DeadLetter) -> bool:
        return await client.bus.requests.drop_dead_letter(letter.letter_id)

    for letter, was_there in _act("drop", options, ids, remove, everything, yes):
        if as_json:
            print_json({"letter_id": letter.letter_id, "dropped": was_there})
        else:
            typer.echo(f"{letter.letter_id} is {'dropped' if was_there else 'gone already'}")


def _letters(options: Options) -> list[DeadLetter]:
    """Return the dead letters, of the model that is named or of all."""

    async def read(client: BusClient) -> list[DeadLetter]:
        letters = await client.bus.requests.dead_letters()
        if options.served is None:
            return letters
        model = await find_served(client, options.served)
        return [letter for letter in letters if letter.model == model]

    return operate(replace(options, served=None), read)


def _act(
    verb: str,
    options: Options,
    ids: Sequence[str] | None,
    work: Callable[[BusClient, DeadLetter], Awaitable[T]],
    everything: bool,
    yes: bool,
) -> list[tuple[DeadLetter, T]]:
    """Process each of the letters, or none if an id is unknown."""
    if bool(ids) == everything:
        raise ConfigError(f"give the ids of letters to {verb}, or --all")
    letters = _letters(options)
    chosen = letters if everything else _chosen(letters, ids or ())
    if everything and chosen and not yes:
        typer.confirm(f"{verb} {len(chosen)} dead letters?", abort=True, err=True)

    async def each(client: BusClient) -> list[tuple[DeadLetter, T]]:
        return [(letter, await work(client, letter)) for letter in chosen]

    return operate(replace(options, served=None), each)


def _chosen(letters: Sequence[DeadLetter], ids: Sequence[str]) -> list[DeadLetter]:
    """Return the letters with these ids. Raises typer.Exit: one is unknown."""
    by_id = {letter.letter_id: letter for letter in letters}
    wanted = list(dict.fromkeys(ids))
    unknown = [letter_id for letter_id in wanted if letter_id not in by_id]
    for letter_id in unknown:
        complain(f"there is no dead letter {letter_id!r}; see `nano-inference dlq list`")
    if unknown:
        raise typer.Exit(1)
    return [by_id[letter_id] for letter_id in wanted]
