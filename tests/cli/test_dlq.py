"""The commands for dead letters, on letters as admission writes them."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from redis import Redis

from nano_inference.bus import RequestEntry, open_bus
from nano_inference.bus.public import ErrorInfo, GenerateRequest
from nano_inference.config import BusConfig
from nano_inference.store.redis.keys import Keys

from .conftest import Run, assert_refused

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def letters(on_nobody: str, redis_url: str) -> list[str]:
    """The ids of three dead letters."""

    async def add_dead_letter() -> list[str]:
        async with aclosing(open_bus(BusConfig(url=redis_url, prefix=on_nobody))) as bus:
            for index in range(3):
                request = GenerateRequest(request_id=f"r{index}", prompt=f"{index} \x1b[31mred")
                entry = RequestEntry(f"{index + 1}-0", request, traceparent=TRACEPARENT)
                error = ErrorInfo(code="lane_failed", message="the lane failed 3 times")
                await bus.requests.add_dead_letter(entry, error, 3)
            return [letter.letter_id for letter in await bus.requests.dead_letters()]

    return asyncio.run(add_dead_letter())


def left(run: Run) -> list[str]:
    lines = run("dlq", "list", "--json").stdout.splitlines()
    return [json.loads(line)["letter_id"] for line in lines]


def test_list_of_none(run: Run, on_nobody: str) -> None:
    assert run("dlq", "list")[:2] == (0, "no dead letters\n")
    assert run("dlq", "list", "--json")[:2] == (0, "")


def test_list(run: Run, letters: list[str]) -> None:
    lines = run("dlq", "list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["letter", *letters]
    assert [line.split()[-2:] for line in lines[1:]] == [
        [f"r{index}", "lane_failed"] for index in range(3)
    ]
    assert left(run) == letters


def test_show(run: Run, letters: list[str]) -> None:
    ran = run("dlq", "show", letters[1])
    assert ran.status == 0
    assert "the lane failed 3 times (lane_failed)" in ran.stdout
    assert '"request_id": "r1"' in ran.stdout
    assert "\x1b" not in ran.stdout, "a prompt may not steer the terminal"
    shown = json.loads(run("dlq", "show", letters[1], "--json").stdout)
    assert shown["request"]["prompt"] == "1 \x1b[31mred"


def test_retry_publishes_and_drops(
    run: Run, letters: list[str], on_nobody: str, redis_url: str
) -> None:
    ran = run("dlq", "retry", letters[2], letters[0])
    assert ran.status == 0
    assert left(run) == [letters[1]]
    with Redis.from_url(redis_url, decode_responses=True) as redis:
        entries = redis.xrange(Keys(on_nobody).requests)
    assert [line.split()[-1] for line in ran.stdout.splitlines()] == [name for name, _ in entries]
    requests = [json.loads(fields["json"]) for _, fields in entries]
    assert [request["prompt"][0] for request in requests] == ["2", "0"]
    assert all("request_id" not in request for request in requests), "the old ids may be in use"
    assert {fields["traceparent"] for _, fields in entries} == {TRACEPARENT}


def test_drop(run: Run, letters: list[str], on_nobody: str, redis_url: str) -> None:
    assert run("dlq", "drop", letters[0]).status == 0
    assert left(run) == letters[1:]
    done = json.loads(run("dlq", "drop", letters[1], "--json").stdout)
    assert done == {"letter_id": letters[1], "dropped": True}
    with Redis.from_url(redis_url) as redis:
        assert not redis.exists(Keys(on_nobody).requests)


@pytest.mark.parametrize("command", ["show", "retry", "drop"])
def test_an_unknown_id_changes_nothing(run: Run, letters: list[str], command: str) -> None:
    known = [] if command == "show" else letters[:1]
    ran = run("dlq", command, *known, "7-7")
    assert (ran.status, ran.stdout) == (1, "")
    assert ran.stderr.startswith("nano-inference: there is no dead letter '7-7'")
    assert left(run) == letters


@pytest.mark.parametrize("command", ["retry", "drop"])
def test_all(run: Run, letters: list[str], command: str) -> None:
    assert run("dlq", command, "--all", stdin="").status == 130, "a closed input confirms nothing"
    assert left(run) == letters
    assert len(run("dlq", command, "--all", "--yes").stdout.splitlines()) == 3
    assert left(run) == []
    assert run("dlq", command, "--all").status == 0, "nothing to confirm"


@pytest.mark.parametrize("arguments", [[], ["1-0", "--all"]])
def test_ids_or_all(run: Run, on_nobody: str, arguments: list[str]) -> None:
    assert_refused(run("dlq", "drop", *arguments), "give the ids of letters to drop, or --all")
