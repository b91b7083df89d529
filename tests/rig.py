"""Access to benchmarks/, which is no package, and its server that can be killed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

FOLDER = str(Path(__file__).parent.parent / "benchmarks")


def load(name: str) -> Any:
    """Import a module of that folder."""
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    return importlib.import_module(name)


@asynccontextmanager
async def mortal_server(folder: Path, fsync: str = "always") -> AsyncIterator[Any]:
    """Run a server that can be killed and started again, with an append-only file."""
    server = load("chaos_rig").RedisServer(folder, fsync)
    await server.start()
    try:
        yield server
    finally:
        server.kill()
