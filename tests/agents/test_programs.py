"""Each program, in an environment of its own, writes and reads a file by its tools."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..examples.environments import node_environment, python_environment
from .conversations import Task
from .programs import HERE, NODE, PROGRAMS, Program
from .results import asks, write_result
from .script import DONE
from .scripted import ScriptedGateway, scripted_config

LIMIT_S = 200
TURNS = 3
"""Write, read, report."""

# A turn over each interface is in test_scripted.py.
pytestmark = [pytest.mark.slow, pytest.mark.soak(only=True)]


@pytest.fixture(scope="module")
def install(pytestconfig: pytest.Config) -> Callable[[str], str]:
    """Install a program; return the folders of its commands, for PATH."""
    if shutil.which("npm") is None:
        pytest.skip("there is no Node")
    cache: pytest.Cache = pytestconfig.cache  # type: ignore[assignment]
    folder = cache.mkdir("clients")

    def installed(name: str) -> str:
        program = PROGRAMS[name]
        if program.registry == "pip":
            return str(python_environment(f"agent_{name}", program.packages, folder))
        found = [
            node_environment(f"node_agent_{name}", program.packages, folder),
            node_environment("node_itself", NODE, folder),
        ]
        return os.pathsep.join(str(each / "node_modules" / ".bin") for each in found)

    return installed


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_writes_and_reads_a_file(
    name: str, install: Callable[[str], str], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    path = await asyncio.to_thread(install, name)
    program, task = PROGRAMS[name], Task("walnut", str(tmp_path / "note.txt"))
    with scripted_config() as config:
        gateway = ScriptedGateway(config)
        async with gateway:
            values = {"url": gateway.url, "folder": str(tmp_path), "prompt": task.prompt}
            printed = await _run(program, values, path)
    failed = [
        call
        for call in gateway.recorder.failed
        if not f"{call.method} {call.path}".startswith(program.probes)
    ]
    assert not failed, failed
    assert (tmp_path / "note.txt").read_text() == "walnut\n", printed
    asking = [call for call in gateway.recorder.calls if asks(call)]
    assert len(asking) >= TURNS, [call.path for call in gateway.recorder.calls]
    assert "walnut" in printed.partition(DONE)[2], (printed, asking[-1].answer)
    if pytestconfig.getoption("--write-docs"):
        write_result(name, program, gateway.recorder)


async def _run(program: Program, values: dict[str, str], path: str) -> str:
    """Return what a program printed that ended well."""
    folder = Path(values["folder"])
    (folder / "home").mkdir()
    for name, text in program.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(program.filled(text, **values))
    if program.script and program.registry == "npm":
        # A program of Node finds packages from where it lies.
        (folder / "node_modules").symlink_to(Path(path.partition(os.pathsep)[0]).parent)
        for file in HERE.glob("*.?js"):
            shutil.copy(file, folder)
    own = {name: program.filled(text, **values) for name, text in program.variables.items()}
    # Nothing of the person's own settings and keys.
    kept = {name: os.environ[name] for name in ("TMPDIR", "LANG") if name in os.environ}
    # `nano-inference` is beside our interpreter.
    places = os.pathsep.join([path, str(Path(sys.executable).parent), os.environ["PATH"]])
    kept |= {"PATH": places, "HOME": str(folder / "home")}
    process = await asyncio.create_subprocess_exec(
        *(program.filled(each, **values) for each in program.command),
        cwd=folder,
        env=kept | {"NO_COLOR": "1", "CI": "1"} | own,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            printed = (await process.communicate())[0].decode(errors="replace")
    finally:
        _kill_all_of(folder / "home")
    assert process.returncode == 0, printed
    return printed


def _kill_all_of(home: Path) -> None:
    """Kill what was started with this home, daemons too, which have left the process group."""
    mark = f"HOME={home}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
