"""Training samples of a session by the command line, over a bus and at a server."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from pyarrow import parquet

from nano_inference.bus import open_bus
from nano_inference.bus.public import Completion, CompletionSample, TreeSession
from nano_inference.bus.trees import keep
from nano_inference.config import Config
from nano_inference.pipeline.token_tree import SessionSample

from .conftest import Run, assert_refused

SAMPLE = CompletionSample(
    sample_index=0,
    text="a",
    token_ids=(7, 8),
    logprobs=(-0.5, -1.5),
    finish_reason="stop",
    weight_versions=((3, 0),),
    support_logprobs=(-0.25, 0.0),
)
TURN = Completion(
    request_id="r",
    entry_id="1-0",
    model="tiny",
    status="done",
    samples=(SAMPLE, replace(SAMPLE, sample_index=1, token_ids=(9, 8))),
    prompt_token_ids=(1, 2),
    session=TreeSession(id="agent/7", tenant="t"),
)


@pytest.fixture
def session(on_served: Config) -> str:
    """A session with one turn of two samples."""

    async def keep_turn() -> None:
        config = replace(on_served.bus, trees_max_bytes=1 << 20)
        async with aclosing(open_bus(config)) as bus:
            await keep(bus.store.trees, [TURN], 1)

    asyncio.run(keep_turn())
    return "agent/7"


def test_samples_are_lines_or_a_table(
    run: Run, place: list[str], session: str, tmp_path: Path
) -> None:
    asked = ("samples", session, "--tenant", "t", *place)
    ran = run(*asked)
    assert ran.status == 0, ran
    first, second = (
        msgspec.json.decode(line, type=SessionSample) for line in ran.stdout.splitlines()
    )
    assert (first.token_ids, first.loss_mask) == ([1, 2, 7, 8], [0, 0, 1, 1])
    assert first.logprobs == [0, 0, -0.5, -1.5]
    assert first.support_logprobs == [0, 0, -0.25, 0]
    assert (second.token_ids, second.num_shared, second.path) == ([1, 2, 9, 8], 2, 1)
    file = tmp_path / "samples.parquet"
    ran = run(*asked, "--format", "parquet", "--out", str(file), "--delete")
    assert (ran.status, ran.stdout) == (0, ""), ran
    rows = parquet.read_table(file).to_pylist()
    assert [msgspec.convert(row | {"images": []}, SessionSample) for row in rows] == [first, second]
    assert_refused(run(*asked), "there is no session 'agent/7' here")


def test_wrong_options_are_refused(run: Run) -> None:
    assert_refused(run("samples", "s", "--format", "csv"), "parquet")
