"""`nano-inference launch`: a program of others on a server and a model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Annotated, NamedTuple, NoReturn

import typer

from ..config import API_KEY_VARIABLE, ConfigError, nearest, shown
from .agents import AGENTS, Agent
from .clients import client_at
from .connection import ServerAddress, run_with, running_server, server_of
from .options import AskedModel, Options, argument, option, takes
from .terminal import complain

FOLDER = Path("~/.cache/nano-inference/launch")
"""The folder of the programs' own folders here."""

NO_KEY = "none"
"""The key for a server without keys: programs want one."""

_SHOWN_KEY = f"${{{API_KEY_VARIABLE}:-{NO_KEY}}}"
"""The key in a printed script, which the shell that runs it replaces."""

# It stands for the key until a script is written, and is in no text of a program.
_MARK = "\0key\0"


class Launch(NamedTuple):
    """A program that is ready to start.

    Attributes:
        command: Its command line.
        variables: Variables of its environment.
        files: Its files by path.
    """

    command: list[str]
    variables: dict[str, str]
    files: dict[Path, str]


@takes(Options, "url", "api_key", "log_level")
def launch(
    options: Options,
    program: Annotated[str, argument("PROGRAM", f"One of {', '.join(AGENTS)}.")],
    arguments: Annotated[
        list[str] | None, argument("-- ARGUMENT", "The program's own arguments.")
    ] = None,
    model: AskedModel = None,
    printed: Annotated[
        bool, option("--print", "Print a shell script that does the same, without the key.")
    ] = False,
) -> None:
    """Start a program of others on a server: its address, a key and a model are set.

        nano-inference serve                     (in another terminal)

        nano-inference launch codex

        nano-inference launch claude --url http://127.0.0.1:8000 --model coder -- -p "Fix the tests"

    The program has to be installed. Its own settings stay as they are: variables, arguments and
    files of its own in ~/.cache/nano-inference/launch say what differs. The key of --api-key, or
    of the environment, is never printed.

        nano-inference launch qwen --print
    """
    if (agent := AGENTS.get(program)) is None:
        raise ConfigError(f"PROGRAM is {shown(program)}{nearest(program, AGENTS)}")
    named = options.url is not None
    server = server_of(options) if named else running_server(options) or server_of(options)
    if not printed and shutil.which(agent.command[0]) is None:
        raise ConfigError(f"{agent.command[0]} is not on the PATH; install it: {agent.install}")
    if model is None or not printed:
        model = _model_of(server, model)
    key = _MARK if printed else server.api_key or NO_KEY
    ready = launch_of(program, server.url, model, key, arguments or ())
    if printed:
        typer.echo(script_of(ready))
        return
    _start(ready)


def launch_of(
    program: str, api: str, model: str, key: str = NO_KEY, arguments: Sequence[str] = ()
) -> Launch:
    """Return a program ready to start.

    Args:
        program: One of `AGENTS`.
        api: The address of OpenAI's interface.
        model: The model's name.
        key: The key for the server.
        arguments: The user's own.
    """
    agent: Agent = AGENTS[program]
    folder = FOLDER.expanduser() / program
    values = {
        "url": re.sub("/v1$", "", api),
        "api": api,
        "model": model,
        "key": key,
        "folder": str(folder),
    }
    # Where a text is JSON, a value may stand within quotes.
    in_json = {name: json.dumps(value)[1:-1] for name, value in values.items()}
    in_json["key"] = key if key == _MARK else in_json["key"]

    def filled(text: str) -> str:
        return Template(text).substitute(in_json if text.startswith("{") else values)

    variables = {name: filled(text) for name, text in agent.variables.items()}
    return Launch(
        [*map(filled, agent.command), *arguments],
        {API_KEY_VARIABLE: key} | variables,
        {folder / name: filled(text) for name, text in agent.files.items()},
    )


def script_of(ready: Launch) -> str:
    """Return a shell script that starts a program; the key is read from the environment."""
    lines: list[str] = []
    for path, text in ready.files.items():
        end = "END" if _MARK in text else "'END'"
        if _MARK in text:
            text = re.sub(r"([\\$`])", r"\\\1", text).replace(_MARK, _SHOWN_KEY)
        place, parent = shlex.quote(str(path)), shlex.quote(str(path.parent))
        put = f"(umask 077 && mkdir -p {parent} && cat > {place})"
        lines.append(f"{put} << {end}\n{text}\nEND")
    for name, value in ready.variables.items():
        lines.append(f"export {name}={_quoted(value)}")
    return "\n".join([*lines, " ".join(map(_quoted, ready.command))])


def _quoted(word: str) -> str:
    """Quote a word for a shell; the key is a variable of the shell's."""
    return (
        f'"{_SHOWN_KEY}"'.join(shlex.quote(part) if part else "" for part in word.split(_MARK))
        or "''"
    )


def _model_of(server: ServerAddress, asked: str | None) -> str:
    """Return the model's name, once the server has answered; its first one for None.

    Raises:
        ConfigError: The server has no model.
        NanoInferenceError: The server can't be reached.
    """
    models = run_with(client_at(server), lambda client: client.models())
    if asked is None and not models:
        raise ConfigError(f"the server at {server.url} has no model; load one")
    return asked or models[0].id


def _start(ready: Launch) -> NoReturn:
    """Become the program."""
    for path, text in ready.files.items():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # It may have a key.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    complain(f"starting {ready.command[0]}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(ready.command[0], ready.command, os.environ | ready.variables)
