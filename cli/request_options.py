"""The options of commands that send requests: what a request shall be, and what is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import gathers
from .requests import DEFAULT_MAX_TOKENS, Wanted, parse_constraint, parse_prediction, parse_sampling

_REQUEST, _OUTPUT = "Requests", "Output"


def _option(*names: str, panel: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=text, metavar=metavar, rich_help_panel=panel, show_default=False
    )


Prompts = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT...", help="Prompts; - reads lines of standard input."),
]
RequestFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Requests, one per line."),
]
Chat = Annotated[
    bool, _option("--chat", panel=_REQUEST, text="Put texts through the model's chat template.")
]
Samples = Annotated[
    int | None, _option("--n", "-n", panel=_REQUEST, text="Samples per prompt; 1 by default.")
]
_Temperature = Annotated[
    float | None,
    _option("--temperature", "-t", panel=_REQUEST, text="0, the default, is greedy."),
]
_Seed = Annotated[int | None, _option("--seed", panel=_REQUEST, text="Makes samples repeatable.")]
_Stop = Annotated[
    list[str] | None,
    _option("--stop", panel=_REQUEST, text="End before this text. Repeatable.", metavar="TEXT"),
]
_Sampling = Annotated[
    list[str] | None,
    _option(
        "--sampling",
        panel=_REQUEST,
        text="Any sampling parameter, as top_p=0.9 or logprobs=3. Repeatable.",
        metavar="NAME=VALUE",
    ),
]
_Constraint = Annotated[
    str | None,
    _option(
        "--constraint",
        panel=_REQUEST,
        text="What the answer has to be, as regex='[0-9]+' or json_schema=@FILE.",
        metavar="KIND=VALUE",
    ),
]
_Prediction = Annotated[
    str | None,
    _option(
        "--prediction",
        panel=_REQUEST,
        text="What the answer may be, or @FILE: a draft, where the engine speculates.",
        metavar="TEXT",
    ),
]
_Priority = Annotated[
    int | None, _option("--priority", panel=_REQUEST, text="Higher runs earlier; 0 by default.")
]
_Tenant = Annotated[
    str | None,
    _option("--tenant", panel=_REQUEST, text="Whose request it is.", metavar="NAME"),
]
_Budget = Annotated[
    float | None,
    _option("--budget", panel=_REQUEST, text="Give up when it takes longer.", metavar="SECONDS"),
]
AsJson = Annotated[
    bool, _option("--json", panel=_OUTPUT, text="Print each Completion as a line of JSON.")
]
NoWait = Annotated[
    bool, _option("--no-wait", panel=_OUTPUT, text="Print entry ids, and wait for no answer.")
]
Trace = Annotated[
    bool, _option("--trace", panel=_OUTPUT, text="Draw where the time went, on standard error.")
]


def _max_tokens(default: int) -> Any:
    text = f"Most tokens per answer; {default} by default."
    return Annotated[int | None, _option("--max-tokens", panel=_REQUEST, text=text)]


def takes_wanted_options(
    max_tokens: int = DEFAULT_MAX_TOKENS,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options that say how a request is to be answered, behind its own.

    The command gets them together, as its second argument, a `Wanted`; the first are its
    `Options`, whose decorator stands above this one.

    Args:
        max_tokens: What the command takes when the option is not given.
    """
    annotations = {
        "max_tokens": _max_tokens(max_tokens),
        "temperature": _Temperature,
        "seed": _Seed,
        "stop": _Stop,
        "sampling": _Sampling,
        "constraint": _Constraint,
        "prediction": _Prediction,
        "priority": _Priority,
        "tenant": _Tenant,
        "budget": _Budget,
    }
    return gathers(annotations, _wanted)


def _wanted(
    *,
    stop: list[str] | None,
    sampling: list[str] | None,
    constraint: str | None,
    prediction: str | None,
    budget: float | None,
    **given: Any,
) -> Wanted:
    """Raises ConfigError for what can't be read."""
    parameters = parse_sampling(sampling or ())
    if constraint is not None:
        parameters["constraint"] = parse_constraint(constraint)
    return Wanted(
        stop=tuple(stop or ()),
        sampling=parameters,
        prediction=None if prediction is None else parse_prediction(prediction),
        budget_s=budget,
        **given,
    )
