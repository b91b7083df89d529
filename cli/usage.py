"""Sentences for the command lines that Typer refuses."""

from __future__ import annotations

from typing import Any

from ..config import shown
from .terminal import PROGRAM

_NUMBERS = {"int_parsing": "a whole number", "float_parsing": "a number"}
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
_VALUE_ERROR = "Value error, "


def wants_help(error: BaseException) -> bool:
    """Whether a group was called without a command, for which Typer has printed its help."""
    # Typer doesn't export the class, and compares its name as well.
    return type(error).__name__ == "NoArgsIsHelpError"


def usage_sentence(error: Any) -> str:
    """A usage error of Typer in our form, with the way to the command's help.

    Args:
        error: An exception that has `format_message`.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else PROGRAM
    message = _of_value(error) or str(error.format_message())
    sentence = f"{message[:1].lower()}{message[1:]}".rstrip(".")
    sentence += _advice(error, context, command)
    return f"{sentence}{' See' if sentence.endswith('?') else '; see'} '{command} --help'"


def _of_value(error: Any) -> str:
    """What the value of an option must be; "" for an error that is not about a value.

    Typer reads values by pydantic, whose sentences speak of an input and not of the option.
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
    return f"{name}: {found[0]['msg'].removeprefix(_VALUE_ERROR)}"


def _advice(error: Any, context: Any, command: str) -> str:
    """How to say what was probably meant; "" where that is not clear."""
    if context is None:
        return ""
    if (option := getattr(error, "option_name", None)) is not None:
        if found := _command_with(option, context):
            return f"; it belongs behind a command, as '{command} {found} {option}'"
        return ""
    if not error.message.startswith("Got unexpected extra argument"):
        return ""
    params = context.command.params
    if any(each.param_type_name == "argument" for each in params):
        return "; a text with spaces needs quotes"
    if any("--model" in each.opts for each in params):
        return "; a model is given with --model"
    return ""


def _command_with(option: str, context: Any) -> str:
    """The first command of a group that takes this option; "" for none, or for no group."""
    group = context.command
    for name, command in getattr(group, "commands", {}).items():
        if any(option in each.opts for each in command.params):
            return str(name)
    return ""
