"""Help of the commands: usage, text with examples, then options and commands by group."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .terminal import cut, stdout

MOST_COLUMNS = 100
_NAMES = 26  # columns of the names of options, beyond which the help is below
_COMMAND = 14  # columns of the names of commands
_KINDS: dict[Any, str] = {int: "N", float: "NUMBER", str: "TEXT", Path: "FILE"}
_CLAUSE = re.compile(r"[;:,] ")
_CODE = re.compile(r"`([^`]+)`")


class HelpCommand(TyperCommand):
    """A command with this help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _print(self, ctx)


class HelpGroup(TyperGroup):
    """A command with subcommands and this help.

    Attributes:
        common: Commands that have a line of their own; the rest of a panel is one line of names.
            All have one if this is empty.
    """

    common: frozenset[str] = frozenset()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _print(self, ctx)


class Commands(typer.Typer):
    """A Typer whose commands have this help."""

    def __init__(self, **options: Any) -> None:
        """`options`: those of Typer."""
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(**{"cls": HelpGroup, "context_settings": names, **options})

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """See Typer."""
        return super().command(name, **{"cls": HelpCommand, **options})


def group(describe: Callable[[], None]) -> Commands:
    """Return a command with subcommands, whose help is the function's docstring."""
    return Commands(help=inspect.getdoc(describe), no_args_is_help=True)


def _print(command: Any, context: Any) -> None:
    console = stdout()
    console.width = min(console.width, MOST_COLUMNS)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    console.print(Text.assemble(("Usage: ", "bold"), usage))
    text = inspect.cleandoc(command.help or "")
    for paragraph in _paragraphs(text):
        console.print()
        console.print(paragraph, soft_wrap=paragraph.plain.startswith("  "))  # to be copied
    for title, commands in _panels(_commands(command, context)).items():
        _print_commands(console, title, dict(commands), getattr(command, "common", frozenset()))
    for title, params in _panels(_params(command, context)).items():
        console.print(Text(f"\n{title}", "bold"))
        _print_params(console, params)


def _paragraphs(text: str) -> Iterable[Text]:
    """Return paragraphs filled, and examples, which are indented, line by line."""
    examples: list[str] = []
    for paragraph in [*text.split("\n\n"), ""]:
        if paragraph.startswith("    "):
            examples.append(inspect.cleandoc(paragraph))
            continue
        if examples:
            yield Text("\n".join(f"  {line}" for line in "\n".join(examples).split("\n")), "cyan")
            examples = []
        if paragraph.strip():
            yield _styled(" ".join(paragraph.split()))


def _styled(text: str) -> Text:
    """Return text with code in bold."""
    made = Text()
    for index, part in enumerate(_CODE.split(text)):
        made.append(part, "bold" if index % 2 else "")
    return made


def _panels(items: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for title, item in items:
        panels.setdefault(title, []).append(item)
    return panels


def _commands(command: Any, context: Any) -> Iterable[tuple[str, tuple[str, Any]]]:
    for name in getattr(command, "commands", ()):
        found = command.get_command(context, name)
        if not found.hidden:
            yield found.rich_help_panel or "Commands", (name, found)


def _print_commands(
    console: Console, title: str, commands: dict[str, Any], common: frozenset[str]
) -> None:
    shown = [name for name in commands if name in common or not common]
    others = [name for name in commands if name not in shown]
    console.print(Text(f"\n{title}", "bold"))
    made = _grid(_COMMAND)
    for name in shown:
        text = (commands[name].help or "").split("\n\n")[0]
        sentence = " ".join(text.split()).partition(". ")[0].rstrip(".")
        if common and len(sentence) > (room := console.width - _COMMAND - 6):
            sentence = cut(_CLAUSE.split(sentence)[0], room)
        made.add_row(Text(name, "cyan"), _styled(sentence))
    console.print(Padding.indent(made, 2))
    if others:
        names = _grid(_COMMAND)
        names.add_row(Text("also", "dim"), Text(", ".join(others), "cyan"))
        console.print(Padding.indent(names, 2))


def _params(command: Any, context: Any) -> Iterable[tuple[str, Any]]:
    for param in command.get_params(context):
        if not getattr(param, "hidden", False) and param.help:
            panel = "Arguments" if param.param_type_name == "argument" else "Options"
            yield getattr(param, "rich_help_panel", None) or panel, param


def _grid(width: int) -> Table:
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True, min_width=width)
    made.add_column(ratio=1, overflow="fold")
    return made


def _print_params(console: Console, params: list[Any]) -> None:
    width = min(_NAMES, max(len(_name(param)) for param in params))
    for param in params:
        name, made = _name(param), _grid(width)
        if len(name) > width:
            console.print(Text(f"  {name}", "cyan"))
            name = ""
        made.add_row(Text(name, "cyan"), _help(param))
        console.print(Padding.indent(made, 2))


def _name(param: Any) -> str:
    """Return an option's names, short ones first, and its value."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    shorts = sorted(param.opts, key=len)
    names = ", ".join(shorts)
    if param.secondary_opts:
        names += f" / {', '.join(param.secondary_opts)}"
    return names if param.is_flag else f"{names} {param.metavar or _kind(param)}"


def _kind(param: Any) -> str:
    annotation = param.type_descriptor.annotation
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, typing.get_args(annotation)))
    return _KINDS.get(annotation, "VALUE")


def _help(param: Any) -> Text:
    """Return an option's help, with its default unless the help has it."""
    text = param.help
    default = param.default
    named = "efault" in text or param.show_default is False
    if not (
        named
        or getattr(param, "is_flag", False)
        or callable(default)
        or default in (None, "", (), [])
    ):
        value = default
        if isinstance(value, list | tuple):
            value = ", ".join(map(str, value))
        elif isinstance(value, float):
            value = f"{value:g}"
        text = f"{text.rstrip('.')}; default: {value}."
    if param.envvar:
        text += f" [{param.envvar}]"
    return _styled(text)
