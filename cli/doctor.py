"""`nano-inference doctor`: looks at what a pipeline needs, and says what to do about the rest."""

from __future__ import annotations

import logging
from typing import Annotated

import structlog
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..telemetry import setup_logging
from .checks import Check, all_checks
from .options import Level, Options, takes_options
from .terminal import stdout

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@takes_options("model", "bus", "config_file", "settings")
def doctor(
    options: Options,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Let the stages' own log lines through.")
    ] = False,
) -> None:
    """Check this machine, the bundled model, and what you name.

    Each check is ok, warn or fail, and says what to do:

        nano-inference doctor

        nano-inference doctor --model ~/models/qwen3-0.6b --bus redis://127.0.0.1:6379

    With --model it loads that model and asks it for a few tokens, as a pipeline would. The exit
    status is 1 when a check fails. Figures of speed are rough; nothing else should run meanwhile.
    """
    level = Level.info if verbose else Level.error
    # What is wrong with the model is one of the checks.
    config = replace(options, model=None, log_level=level).config()
    setup_logging(config.telemetry)
    if not verbose:
        # What goes wrong is in the table, in fewer words.
        silent = structlog.make_filtering_bound_logger(logging.CRITICAL)
        structlog.configure(wrapper_class=silent)
        logging.getLogger().setLevel(logging.CRITICAL)
    console = stdout()
    failed = False
    checks = all_checks(config, options.model)
    while True:
        with console.status("looking …"):
            check = next(checks, None)
        if check is None:
            break
        failed = failed or check.state == "fail"
        _print(console, check)
    if failed:
        raise typer.Exit(1)


def _print(console: Console, check: Check) -> None:
    """One row; each is a table of its own, since slow checks come one after the other."""
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=4)
    row.add_column(width=12)
    row.add_column(overflow="fold")
    finding = Text(check.found)
    if check.advice:
        finding.append(f"\n→ {check.advice}", style="dim" if check.state == "ok" else "bold")
    row.add_row(Text(check.state, style=_STYLES[check.state]), Text(check.name), finding)
    console.print(row)
