"""The programs of docs/examples that use the bus itself: clients in other languages, and workers.

Where the toolchain of a language is missing, the test of its client fails, and names the package.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from nano_inference.config import load_config
from nano_inference.pipeline.pipeline import Pipeline

from .environments import FOLDER, FOR_TOOLCHAINS, WORKERS, run

ANSWER = r"12\d"

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(redis_url: str) -> AsyncIterator[Pipeline]:
    """A pipeline with the usual prefix."""
    config = load_config(env={}, overrides={"bus.url": redis_url, "engine.model_path": "tiny"})
    async with Pipeline(config) as pipeline:
        yield pipeline
    async with Redis.from_url(redis_url) as redis:
        for pattern in ("nano:*", "{nano:*", "*celery*", "_kombu*", "questions", "answers"):
            async for key in redis.scan_iter(pattern):
                await redis.delete(key)


@pytest.fixture(scope="module")
def bus_url(pipeline: Pipeline, redis_url: str) -> str:
    return redis_url


async def ran(command: list[str], folder: Path, url: str) -> str:
    return await asyncio.to_thread(run, command, folder, REDIS_URL=url)


@pytest.mark.soak(only=True)
@pytest.mark.parametrize("name", FOR_TOOLCHAINS)
async def test_a_client_in_another_language_needs_its_standard_library_alone(
    name: str, bus_url: str, tmp_path: Path
) -> None:
    client, package = FOR_TOOLCHAINS[name]
    program, source = shutil.which(name), str(FOLDER / client)
    assert program is not None, f"there is no {name}; Debian's package {package} has it"
    commands = {
        "go": [[program, "run", source]],
        "java": [[program, source]],
        "rustc": [[program, "-O", source, "-o", "client"], ["./client"]],
    }[name]
    printed = ""
    for command in commands:
        printed = await ran(command, tmp_path, bus_url)
    assert re.search(rf'"status":"done".*"text":" ?{ANSWER}"', printed), printed


@contextmanager
def running(command: list[str], log: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker meanwhile, in a group of its own processes."""
    with log.open("a") as file:
        environment = os.environ | {"REDIS_URL": url}
        worker = subprocess.Popen(
            command,
            cwd=FOLDER,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait(30)


COMMANDS = {
    "celery_task.py": ["celery", "-A", "celery_task", "worker", "--concurrency", "1"],
    "faststream_subscriber.py": ["faststream", "run", "faststream_subscriber:app"],
}


@pytest.mark.soak(only=True)
@pytest.mark.parametrize("name", WORKERS)
async def test_a_worker_answers_over_the_bus(
    name: str, bus_url: str, programs: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = await asyncio.to_thread(programs, name)
    with running(command_of(name, folder), tmp_path / "log", bus_url):
        printed = await ran([str(folder / "python"), str(FOLDER / name)], FOLDER, bus_url)
    assert re.search(rf"answer: +{ANSWER}", printed), (printed, (tmp_path / "log").read_text())


def command_of(name: str, folder: Path) -> list[str]:
    program, *more = COMMANDS[name]
    return [str(folder / program), *more]


@pytest.mark.soak(only=True)
@pytest.mark.parametrize("name", WORKERS)
async def test_a_worker_that_is_killed_in_mid_task_loses_and_doubles_nothing(
    name: str,
    pipeline: Pipeline,
    bus_url: str,
    programs: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = await asyncio.to_thread(programs, name)
    log, command = tmp_path / "log", command_of(name, folder)
    await pipeline.client.pause()
    async with Redis.from_url(bus_url) as redis:
        known = {each async for each in redis.scan_iter("nano:own:*")}
        asked = [str(folder / "python"), str(FOLDER / name)]
        with running(command, log, bus_url) as worker:
            caller = asyncio.create_task(ran(asked, FOLDER, bus_url))
            while not (own := {each async for each in redis.scan_iter("nano:own:*")} - known):
                assert not caller.done(), caller.result()
                await asyncio.sleep(0.1)  # the request is held
            os.killpg(worker.pid, signal.SIGKILL)
        with running(command, log, bus_url):
            await pipeline.client.resume()
            printed = await caller
        (name_of,) = own
        request_id = name_of.decode().removeprefix("nano:own:")
        outputs = await redis.xrange(f"nano:out:{request_id}")
    assert re.search(rf"answer: +{ANSWER}", printed), (printed, log.read_text())
    assert len(outputs) == 1, "it is generated once"
