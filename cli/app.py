"""The command line: its commands, and how errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ..config import NanoInferenceError
from ..config.extras import advice
from ..pipeline.supervisor import StageFailed
from .adapters import app as adapters
from .admin import app as admin
from .cancel import cancel
from .chat import chat
from .complete import complete
from .demo import demo
from .dlq import app as dlq
from .doctor import doctor
from .embed import embed
from .fairness import app as fairness
from .gateway import gateway
from .health import health
from .models import app as models
from .pull import pull
from .run import run
from .score import score
from .serve import serve
from .status import status
from .submit import submit
from .tail import tail
from .terminal import PROGRAM, complain
from .top import top
from .trace import trace
from .up import up
from .usage import usage_sentence, wants_help
from .weights import app as weights
from .weights import flush_cache, pause, release_memory, resume, resume_memory

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

app = typer.Typer(
    name=PROGRAM,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LOOK, _START, _USE = "Look around", "Start a pipeline", "Use a running pipeline"
_ASK = "Ask a server or a pipeline"
app.command(rich_help_panel=_LOOK)(demo)
app.command(rich_help_panel=_LOOK)(doctor)
app.command(rich_help_panel=_START)(pull)
app.command(rich_help_panel=_START)(serve)
app.command(rich_help_panel=_START)(up)
app.command(rich_help_panel=_START)(run)
app.command(rich_help_panel=_START)(gateway)
for _asking in (chat, complete, cancel):
    app.command(rich_help_panel=_ASK)(_asking)
app.add_typer(models, name="models", rich_help_panel=_ASK)
app.command(rich_help_panel=_USE)(submit)
app.command(rich_help_panel=_USE)(embed)
app.command(rich_help_panel=_USE)(tail)
_KEEP = "Keep a pipeline running"
app.command(rich_help_panel=_KEEP)(status)
app.command(rich_help_panel=_KEEP)(health)
app.command(rich_help_panel=_KEEP)(top)
app.command(rich_help_panel=_KEEP)(trace)
app.add_typer(admin, name="admin", rich_help_panel=_KEEP)
app.add_typer(dlq, name="dlq", rich_help_panel=_KEEP)
app.add_typer(fairness, name="fairness", rich_help_panel=_KEEP)
_TRAIN = "Train with it"
app.add_typer(weights, name="weights", rich_help_panel=_TRAIN)
app.add_typer(adapters, name="adapters", rich_help_panel=_TRAIN)
app.command(rich_help_panel=_TRAIN)(score)
app.command(rich_help_panel=_TRAIN)(pause)
app.command(rich_help_panel=_TRAIN)(resume)
app.command("flush-cache", rich_help_panel=_TRAIN)(flush_cache)
app.command("release-memory", rich_help_panel=_TRAIN)(release_memory)
app.command("resume-memory", rich_help_panel=_TRAIN)(resume_memory)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {metadata.version(PROGRAM)}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """An LLM inference engine for RL rollouts and serving, as a pipeline on a message bus.

    Try it, without a server and without a download:

        nano-inference demo

    Serve a model over HTTP, and talk with it from another terminal:

        nano-inference serve

        nano-inference chat

    Start a pipeline of several processes, and ask it from another terminal:

        nano-inference up

        nano-inference submit "98 + 25 ="

    Each command explains itself: `nano-inference submit --help`.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache
def _commands() -> TyperGroup:
    """Made of `app` once; it takes a third of the time of a short command."""
    commands = get_command(app)
    assert isinstance(commands, TyperGroup)
    return commands


def prepare() -> None:
    """Does ahead what the first command line costs beyond its own, such as imports."""
    commands = _commands()
    with commands.make_context(PROGRAM, ["run"]) as context:
        command = commands.get_command(context, "run")
        assert command is not None
        command.make_context("run", [], parent=context).close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit status.

    0: done. 1: it ran, and a request, a check or a stage failed. 2: it could not run, and one
    sentence on standard error says why. 130: Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        # A model may write any character; a terminal that can't show it must not end the program.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
    try:
        result = _commands()(arguments, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BaseException as error:
        status = _status_of(_cause_of(error))
        if status is None:
            raise
        return status


def _cause_of(error: BaseException) -> BaseException:
    """The error itself, or out of a group the one that decides how the program ends."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause_of(one) for one in error.exceptions]
    deciding = (KeyboardInterrupt, typer.Exit, NanoInferenceError, BrokenPipeError)
    for kind in deciding:
        for cause in causes:
            if isinstance(cause, kind):
                return cause
    return causes[0]


def _status_of(error: BaseException) -> int | None:
    """Says what went wrong; None for what is a bug, whose traceback is wanted."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, BrokenPipeError):
        # Python flushes standard output again as it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, NanoInferenceError):
        complain(error.message)
        return 1 if isinstance(error, StageFailed) else 2
    if isinstance(error, ModuleNotFoundError) and (message := advice(error)):
        complain(message)
        return 2
    if wants_help(error):
        return 0
    if hasattr(error, "format_message"):  # typer's own, and click's
        complain(usage_sentence(error))
        return 2
    return None
