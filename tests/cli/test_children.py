"""The processes of `up`: a fork is like a program of its own, and takes a fraction of its time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from nano_inference.cli.children import (
    Child,
    Forked,
    Forks,
    ForkServer,
    Spawned,
    python,
    spawn,
)
from nano_inference.cli.fork_server import why_not
from nano_inference.cli.process import DRAIN

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked"),
    pytest.mark.asyncio(loop_scope="module"),
]

LIMIT_S = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[ForkServer]:
    """One for all tests; it imports the smallest of the stages."""
    forks = ForkServer(["fairness"], {**os.environ, "NANO_INFERENCE_TELEMETRY__LOG_FORMAT": "json"})
    yield forks
    forks.close()


@pytest.fixture
def waiting(closed_port: int) -> list[str]:
    """The arguments of a process that waits for a Redis that never comes."""
    url = f"redis://127.0.0.1:{closed_port}"
    return ["run", "--with-parent", "--stages", "fairness", "--bus", url]


@pytest.fixture
def running(redis_url: str) -> list[str]:
    """The arguments of a process whose stage waits for the others, which never come."""
    prefix = f"children-{uuid.uuid4().hex[:8]}"
    setting = f"bus.prefix={prefix}"
    return ["run", "--with-parent", "--stages", "fairness", "--bus", redis_url, "--set", setting]


async def text_of(child: Child) -> str:
    """All that it writes, to its end."""
    async with asyncio.timeout(LIMIT_S):
        return b"".join([chunk async for chunk in child.output()]).decode()


async def start(server: ForkServer | None, arguments: list[str]) -> Child:
    async with asyncio.timeout(LIMIT_S):
        if server is None:
            return await spawn([*python(), "nano_inference", *arguments], None)
        return await server.start(arguments)


@pytest.fixture(params=["forked", "spawned"])
def method(request: pytest.FixtureRequest, server: ForkServer) -> ForkServer | None:
    return server if request.param == "forked" else None


async def test_output_and_exit_status_are_the_programs(method: ForkServer | None) -> None:
    child = await start(method, ["run", "--stages", "nonsense"])
    assert "there is no stage 'nonsense'" in await text_of(child)
    assert await child.wait() == child.returncode == 2


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def environment_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def pipes_of(pid: int) -> set[str]:
    opened = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            opened.add(os.readlink(each))
    return {each for each in opened if each.startswith("pipe:")}


async def test_a_child_has_its_own_session_and_title(
    method: ForkServer | None, waiting: list[str]
) -> None:
    child = await start(method, waiting)
    try:
        assert parent_of(child.pid) == os.getpid()
        assert os.getsid(child.pid) == child.pid, "Ctrl-C in a terminal is not for it"
        async with asyncio.timeout(LIMIT_S):
            while "--stages fairness" not in command_of(child.pid):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(pipes_of(child.pid)) == 2, "in and out"
        assert f"PATH={os.environ['PATH']}" in environment_of(child.pid)
        assert child.returncode is None
    finally:
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
    child.send_signal(signal.SIGTERM)  # which nobody gets
    await child.tell(DRAIN)
    assert child.returncode == -signal.SIGKILL


async def test_a_child_drains_on_request(method: ForkServer | None, running: list[str]) -> None:
    child = await start(method, running)
    await child.tell(DRAIN)
    assert "stopped" in await text_of(child)
    assert await child.wait() == 0


async def test_all_waiters_return_at_the_end(server: ForkServer, waiting: list[str]) -> None:
    child = await start(server, waiting)
    ends = [asyncio.create_task(child.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    child.send_signal(signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*ends) == [-signal.SIGKILL] * 3


async def test_many_are_forked_at_a_time(server: ForkServer) -> None:
    async with asyncio.timeout(LIMIT_S):
        children = await asyncio.gather(*(server.start(["--version"]) for _ in range(4)))
        (text,) = set(await asyncio.gather(*map(text_of, children)))
        assert text.startswith("nano-inference ")
        assert await asyncio.gather(*(child.wait() for child in children)) == [0] * 4
        assert len({child.pid for child in children}) == 4


async def test_forks_survive_a_killed_fork_server(server: ForkServer, running: list[str]) -> None:
    """And another one is started in its place."""
    before = await start(server, running)
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    after = await start(server, ["--version"])
    assert (await text_of(after)).startswith("nano-inference ")
    assert before.returncode is None
    await before.tell(DRAIN)
    assert "stopped" in await text_of(before)
    assert await before.wait() == 0


async def test_orphans_of_a_killed_child_are_not_adopted(server: ForkServer) -> None:
    """They would stay as zombies, as ranks of a killed executor would."""
    await (await start(server, ["--version"])).wait()
    child = await spawn(["sh", "-c", "sleep 1000 & echo $!; wait"], None)
    orphan = int(await anext(child.output()))
    child.send_signal(signal.SIGKILL)
    await child.wait()
    try:
        assert parent_of(orphan) != os.getpid()
    finally:
        os.kill(orphan, signal.SIGKILL)


async def test_a_process_with_threads_is_not_forked() -> None:
    assert why_not() == "" or "threads" in why_not()
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert "threads" in why_not()
    finally:
        done.set()
        thread.join()


async def test_without_a_fork_server_a_program_is_spawned() -> None:
    told: list[str] = []
    forks = Forks((), "forkserver", None, told.append)
    forks._servers["fairness"] = ForkServer(["nonsense"], None)
    async with asyncio.timeout(LIMIT_S):
        child = await forks.start("fairness", ["--version"])
    assert isinstance(child, Spawned)
    child.send_signal(signal.SIGKILL)
    await child.wait()
    assert "fairness can't be forked" in told[0]


async def test_a_fork_whose_parent_ends_before_go_exits(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGKILL right after the fork closes its standard input without a word."""
    monkeypatch.setattr("nano_inference.cli.children.GO", b"")
    child = await start(server, ["--version"])
    assert isinstance(child, Forked)
    os.close(child._given)
    child._given = os.open(os.devnull, os.O_WRONLY)
    assert await text_of(child) == ""
    assert await child.wait() == 0
