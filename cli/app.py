"""The command line: its commands, and exit statuses of errors."""

from __future__ import annotations

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from ..config import LaneReplaced, NanoInferenceError, shown
from ..config.errors import leaves_of
from ..config.extras import advice
from ..pipeline.supervisor import StageFailed
from . import admin, dlq, local, models, operations
from .batches import files
from .batches import server as batches
from .cancel import cancel
from .chat import chat, complete
from .demo import demo
from .doctor import doctor
from .embed import embed, score
from .help import Commands, HelpGroup
from .launch import launch
from .options import option
from .pull import pull
from .quantize import quantize
from .replay import digest, replay
from .run import run
from .samples import samples
from .serve import gateway, serve
from .status import health, status
from .submit import submit
from .terminal import PROGRAM, Complaints, complain
from .top import top
from .trace import trace
from .up import down, up

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""

PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit status when the reader of standard output has ended, as in shells."""


class _Root(HelpGroup):
    common = frozenset(
        {"chat", "complete", "demo", "doctor", "list", "models", "ps", "pull", "serve", "status"}
        | {"score", "stop", "submit", "top", "trace", "up", "weights"}
    )


app = Commands(name=PROGRAM, cls=_Root, pretty_exceptions_enable=False)

_COMMANDS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Look around": {
        "demo": demo,
        "doctor": doctor,
        "list": local.list_models,
        "ps": local.ps,
        "version": local.version,
    },
    "Start a pipeline": {
        "pull": pull,
        "quantize": quantize,
        "serve": serve,
        "up": up,
        "stop": local.stop,
        "logs": local.logs,
        "down": down,
        "run": run,
        "gateway": gateway,
    },
    "Ask a server or a pipeline": {
        "chat": chat,
        "complete": complete,
        "cancel": cancel,
        "batch": batches.app,
        "files": files.app,
        "models": models.app,
        "launch": launch,
    },
    "Use a running pipeline": {
        "submit": submit,
        "embed": embed,
        "tail": operations.tail,
        "replay": replay,
        "digest": digest,
    },
    "Operate a pipeline": {
        "status": status,
        "health": health,
        "top": top,
        "trace": trace,
        "pause": operations.pause,
        "resume": operations.resume,
        "kv-events": operations.kv_events,
        "admin": admin.app,
        "dlq": dlq.app,
        "fairness": operations.fairness,
        "roles": operations.roles,
        "shards": operations.shards,
        "experts": operations.experts,
        "kv-session": operations.kv_session,
    },
    "Train with a pipeline": {
        "weights": operations.weights,
        "adapters": operations.adapters,
        "score": score,
        "samples": samples,
        "flush-cache": operations.flush_cache,
        "release-memory": operations.release_memory,
        "resume-memory": operations.resume_memory,
    },
}
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {metadata.version(PROGRAM)}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, option("--version", "Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """An LLM inference engine for RL rollouts and serving.

        nano-inference demo          (try it, without a server or a download)

        nano-inference serve         (serve a model over HTTP)

        nano-inference chat          (talk with it, from another terminal)

    Each command has its own help: `nano-inference submit --help`.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache
def _group() -> TyperGroup:
    """Return `app` as Click's group; making it takes a third of the time of a short command."""
    made = get_command(app)
    assert isinstance(made, TyperGroup)
    return made


def prepare() -> None:
    """Do one-time work of command lines, such as imports, before a fork."""
    commands = _group()
    with commands.make_context(PROGRAM, ["run"]) as context:
        command = commands.get_command(context, "run")
        assert command is not None
        command.make_context("run", [], parent=context).close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status.

    0: success. 1: a request, a check or a stage failed. 2: the command could not run, and a
    sentence on standard error has the reason. 3: another process serves the lane. 130: Ctrl-C.
    141: the reader of standard output, such as `head`, has ended.
    """
    Complaints.as_json = False
    for stream in (sys.stdout, sys.stderr):
        # A model may write characters that a terminal can't show.
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
    try:
        result = _group()(arguments, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BaseException as error:
        status = _status_of(_cause_of(error))
        if status is None:
            raise
        return status


def _cause_of(error: BaseException) -> BaseException:
    """Return the error itself, or of a group the one that decides the exit status."""
    causes = leaves_of(error)
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return error.__context__  # Typer's answer to it
    for kind in (KeyboardInterrupt, typer.Exit, NanoInferenceError, BrokenPipeError):
        for cause in causes:
            if isinstance(cause, kind):
                return cause
    return causes[0]


def _status_of(error: BaseException) -> int | None:
    """Print the error, and return the exit status; None for a defect, which has a traceback."""
    match error:
        case KeyboardInterrupt() | typer.Abort():
            return INTERRUPTED
        case typer.Exit():
            return error.exit_code
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        case BrokenPipeError():
            # Python flushes standard output again at exit, and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED
        case NanoInferenceError():
            complain(str(error))
            return {StageFailed: 1, LaneReplaced: 3}.get(type(error), 2)
        case ModuleNotFoundError() if message := advice(error):
            complain(message)
            return 2
    # A group without a command has printed its help. Typer doesn't export the class.
    if type(error).__name__ == "NoArgsIsHelpError":
        return 0
    if hasattr(error, "format_message"):  # Typer's usage errors
        complain(usage_sentence(error))
        return 2
    return None


# --- usage errors -------------------------------------------------------------------------------

_POSSIBLE = re.compile(r" \(Possible options: (.*)\)")
_NO_COMMAND = re.compile(r"No such command '(\w+)'")

_NUMBERS = {"int_parsing": "a whole number", "float_parsing": "a number"}
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}


_OF_OTHERS = {
    "bench": "benchmarks/ has programs that measure",
    "generate": "'nano-inference submit' sends a prompt",
    "ls": "'nano-inference list' lists them",
    "rm": "a pulled model is a folder; delete it",
    "show": "'nano-inference list' shows them",
    "start": "'nano-inference serve' or 'up' starts one",
}
"""Commands of other programs, each with what does the same here."""


_NEAR = 0.6
"""Likeness from which an option is suggested for a mistyped one."""


def usage_sentence(error: Any) -> str:
    """Return a usage error of Typer in our form, with the command's help.

    Args:
        error: An exception that has `format_message`.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else PROGRAM
    message = _of_value(error) or str(error.format_message())
    if (name := _NO_COMMAND.match(message)) and (ours := _OF_OTHERS.get(name[1])):
        return f"there is no command {name[1]!r}; {ours}"
    if possible := _POSSIBLE.search(message):
        typed = message[: possible.start()].rpartition(" ")[2].lstrip("-")
        named = {name.lstrip("-"): name for name in possible[1].split(", ")}
        near = difflib.get_close_matches(typed, named, n=1, cutoff=_NEAR)
        message = message[: possible.start()]
        message += "".join(f"; did you mean {named[name]}?" for name in near)
    sentence = f"{message[:1].lower()}{message[1:]}".rstrip(".")
    sentence += _advice(error, context, command)
    return f"{sentence}{' See' if sentence.endswith('?') else '; see'} '{command} --help'"


def _of_value(error: Any) -> str:
    """Return what the value of an option must be; "" for an error that is not about a value.

    Typer parses values by pydantic, whose sentences do not name the option.
    """
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    param = getattr(error, "param", None)
    if not found or param is None:
        return ""
    name, given = " / ".join(param.opts), shown(found[0].get("input"))
    kind, limits = found[0]["type"], found[0].get("ctx", {})
    if kind in _NUMBERS:
        return f"{name} must be {_NUMBERS[kind]}; got {given}"
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        return f"{name} must be {words} {limits[limit]:g}; got {given}"
    return f"{name}: {found[0]['msg'].removeprefix('Value error, ')}"


def _advice(error: Any, context: Any, command: str) -> str:
    """Return the probable correction; "" if unclear."""
    if context is None:
        return ""
    if (option := getattr(error, "option_name", None)) is not None:
        # An option before the subcommand.
        for name, each in getattr(context.command, "commands", {}).items():
            if any(option in param.opts for param in each.params):
                return f"; it belongs after a command, as '{command} {name} {option}'"
        return ""
    if not error.message.startswith("Got unexpected extra argument"):
        return ""
    params = context.command.params
    if any(each.param_type_name == "argument" for each in params):
        return "; a text with spaces needs quotes"
    if any("--model" in each.opts for each in params):
        # Other programs talk to a model by this name.
        is_run = context.info_name == "run"
        serving = "; 'nano-inference serve MODEL' serves it, and 'nano-inference chat' talks to it"
        return f"; a model is given with --model{serving if is_run else ''}"
    return ""
