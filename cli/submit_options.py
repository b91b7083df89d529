"""The options of `submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_REQUEST, _OUTPUT = "Requests", "Output"


def _option(*names: str, panel: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, help=text, metavar=metavar, rich_help_panel=panel, show_default=False
    )


Prompt = Annotated[
    str | None,
    typer.Argument(metavar="TEXT", help="The prompt; - reads lines of standard input."),
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
MaxTokens = Annotated[
    int | None,
    _option("--max-tokens", panel=_REQUEST, text="Most tokens per answer; 64 by default."),
]
Temperature = Annotated[
    float | None,
    _option("--temperature", "-t", panel=_REQUEST, text="0, the default, is greedy."),
]
Seed = Annotated[int | None, _option("--seed", panel=_REQUEST, text="Makes samples repeatable.")]
Stop = Annotated[
    list[str] | None,
    _option("--stop", panel=_REQUEST, text="End before this text. Repeatable.", metavar="TEXT"),
]
Sampling = Annotated[
    list[str] | None,
    _option(
        "--sampling",
        panel=_REQUEST,
        text="Any sampling parameter, as top_p=0.9 or logprobs=3. Repeatable.",
        metavar="NAME=VALUE",
    ),
]
Priority = Annotated[
    int | None, _option("--priority", panel=_REQUEST, text="Higher runs earlier; 0 by default.")
]
Tenant = Annotated[
    str | None,
    _option("--tenant", panel=_REQUEST, text="Whose request it is.", metavar="NAME"),
]
Budget = Annotated[
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
