"""The processes of an `up`, one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

from nano_inference.cli.children import Forks
from nano_inference.cli.processes import GATEWAY, Printer, Processes
from nano_inference.config import Config, all_roles


def processes_of(
    config: Config,
    environment: Mapping[str, str] | None = None,
    *,
    stream: TextIO | None = None,
    forks: Forks | None = None,
) -> Processes:
    """Those of a lane and a gateway. None runs; close its forks."""
    roles = (*all_roles(config.pipeline.replicas), GATEWAY)
    printer = Printer(stream=stream)
    method = config.pipeline.start_method
    forks = forks or Forks(roles, method, environment, printer.say)
    return Processes(config, roles, forks, printer)
