"""`nano-inference trace`: one request's trace out of a file, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from ..config import ConfigError
from ..telemetry.trace_page import page
from ..telemetry.trace_tree import find_trace, jaeger
from .options import Options, argument, option, takes
from .terminal import stderr, stdout
from .waterfall import TraceView


@takes(Options, "config_file", "settings")
def trace(
    options: Options,
    request_id: Annotated[
        str, argument("REQUEST_ID", "The request's id, its entry's id, or the trace's id.")
    ],
    file: Annotated[
        Path | None, option("--file", "The trace file; default: `telemetry.trace_file`.")
    ] = None,
    html: Annotated[
        Path | None, option("--html", "Write a page for the browser there.", "FILE")
    ] = None,
    jaeger_file: Annotated[
        Path | None, option("--jaeger", "Write a file for Jaeger's UI there.", "FILE")
    ] = None,
) -> None:
    """Show the time of a request's spans, from a trace file.

    A pipeline writes the file if it is set; its processes may share it:

        nano-inference up --set telemetry.trace_file=traces.jsonl

        nano-inference trace my-request --file traces.jsonl

        nano-inference trace my-request --file traces.jsonl --html trace.html

    The page is self-contained. Jaeger's search page loads the file of --jaeger under "Upload".
    """
    config = options.config()
    if file is None and not config.telemetry.trace_file:
        raise ConfigError(
            "there is no trace file: give --file, or start the pipeline and this command with "
            "telemetry.trace_file set"
        )
    found = find_trace(file or Path(config.telemetry.trace_file).expanduser(), request_id)
    if html is None and jaeger_file is None:
        stdout().print(TraceView(found))
    if html is not None:
        _write(html, page(found).encode())
    if jaeger_file is not None:
        _write(jaeger_file, msgspec.json.encode(jaeger(found)))


def _write(target: Path, content: bytes) -> None:
    try:
        target.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror or error}") from None
    stderr().print(f"wrote {target}")
