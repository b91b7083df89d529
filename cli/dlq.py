"""`nano-inference dlq`: the dead letters, requests that failed repeatedly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import typer

from ..bus.dead_letters import DeadLetter
from ..config import ConfigError
from .clients import run_operation
from .connection import target_of
from .operations import COMMANDS, Row, command, table
from .options import AsJson, Options, argument, group, option, takes_status_options
from .terminal import complain, cut, date, harmless, one_line, print_json


@group
def app() -> None:
    """List, repeat and remove dead letters: requests that failed repeatedly.

    A request whose lane fails each time is answered with an error and kept here:

        nano-inference dlq list

        nano-inference dlq show 1795185430038-0

        nano-inference dlq retry 1795185430038-0

        nano-inference dlq drop --all
    """


LetterIds = Annotated[list[str] | None, argument("ID...", "As `dlq list` shows them.")]
All = Annotated[bool, option("--all", "All dead letters.")]
Yes = Annotated[bool, option("--yes -y", "Confirm --all.")]


@app.command("list")
@command(
    "dead_letters",
    table(
        lambda letters: [
            (
                each.letter_id,
                date(each.died_ns),
                each.deaths,
                cut(one_line(each.request.request_id or "-"), 16),
                each.error.code,
            )
            for each in letters
        ],
        *("letter", "given up", "deaths", "request", "error"),
        empty="no dead letters",
        right=("deaths",),
        fold=("error",),
    ),
    lines=True,
)
def list_letters() -> None:
    """Print all dead letters, oldest first.

    nano-inference dlq list
    """


@app.command("show")
@takes_status_options
def show_letter(
    options: Options,
    letter_id: Annotated[str, argument("ID", "As `dlq list` shows it.")],
    as_json: AsJson = False,
) -> None:
    """Print one dead letter with its whole request.

    nano-inference dlq show 1795185430038-0
    """
    (letter,) = _chosen(run_operation(options, "dead_letters", {}), [letter_id])
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
@takes_status_options
def retry(
    options: Options,
    ids: LetterIds = None,
    everything: All = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Publish the requests of dead letters again, and remove the letters.

    nano-inference dlq retry 1795185430038-0

    It is a new request in the old trace: its answer is under the id that is printed, since the old
    id may still have its old answer. With several models it goes to the same model.
    """
    for letter_id, entry_id in _act("retry", options, ids, everything, yes):
        if as_json:
            print_json({"letter_id": letter_id, "request_id": entry_id})
        else:
            typer.echo(f"{letter_id} is published again; its answer is under {entry_id}")


@app.command()
@takes_status_options
def drop(
    options: Options,
    ids: LetterIds = None,
    everything: All = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove dead letters.

    nano-inference dlq drop 1795185430038-0
    """
    for letter_id, was_there in _act("drop", options, ids, everything, yes):
        if as_json:
            print_json({"letter_id": letter_id, "dropped": was_there})
        else:
            typer.echo(f"{letter_id} is {'dropped' if was_there else 'gone already'}")


def _act(
    verb: str, options: Options, ids: Sequence[str] | None, everything: bool, yes: bool
) -> Iterable[tuple[str, Any]]:
    """Process each of the letters, or none if an id is unknown; return the results by letter."""
    if bool(ids) == everything:
        raise ConfigError(f"give the ids of letters to {verb}, or --all")
    target = target_of(options)
    letters = run_operation(options, "dead_letters", {}, target=target)
    chosen = letters if everything else _chosen(letters, ids or ())
    if not chosen:
        complain(f"there are no dead letters to {verb}")
        return []
    if everything and not yes:
        typer.confirm(f"{verb} {len(chosen)} dead letters?", abort=True, err=True)
    found = {"ids": [letter.letter_id for letter in chosen]}
    done: dict[str, Any] = run_operation(options, f"{verb}_dead_letters", found, target=target)
    return done.items()


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


COMMANDS += [Row(retry, "retry_dead_letters"), Row(drop, "drop_dead_letters")]
