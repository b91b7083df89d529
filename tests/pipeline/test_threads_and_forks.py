"""An engine is used by several threads, which take turns, and by no fork of its process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.utils.data import DataLoader

from nano_inference import InferenceEngine, Pipeline, SamplingParams
from nano_inference.config import Config, ModelError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LIMIT_S = 60


@pytest.fixture(scope="module")
def engine() -> Iterator[InferenceEngine]:
    with InferenceEngine() as engine:
        yield engine


def test_threads_take_turns(engine: InferenceEngine) -> None:
    """One prompt at a time, all at once, and step by step; each gets the samples of its prompts."""
    prompts = [f"{number} + {3 * number} =" for number in range(24)]
    expected = [sample.completion_tokens for sample in engine.generate(prompts, GREEDY)]

    def one_by_one(part: int) -> list[tuple[int, ...]]:
        asked = prompts[part::3]
        return [engine.generate([each], GREEDY)[0].completion_tokens for each in asked]

    def stepwise() -> set[int]:
        for number in range(4):
            engine.add_request("Once", GREEDY, request_id=number)
        seen: set[int] = set()
        while len(seen) < 4:
            seen |= {int(sample.request_id or 0) for sample in engine.step()}
        return seen

    with ThreadPoolExecutor() as pool:
        steps = pool.submit(stepwise)
        parts = list(pool.map(one_by_one, range(3), timeout=LIMIT_S))
        assert steps.result(LIMIT_S) == {0, 1, 2, 3}
    assert [parts[number % 3][number // 3] for number in range(len(prompts))] == expected
    assert not engine.has_pending()


def in_a_fork(work: Callable[[], object]) -> str:
    """Run this in a fork of the test's process; return the code of its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = "none"
        try:
            signal.alarm(LIMIT_S)
            work()
        except ModelError as error:
            code = error.code
        except BaseException as error:  # noqa: BLE001
            code = repr(error)
        finally:
            os.write(writing, code.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        code = told.read()
    os.waitpid(child, 0)
    return code


WAYS: dict[str, Callable[[InferenceEngine], object]] = {
    "generate": lambda engine: engine.generate(["1"]),
    "step": lambda engine: engine.step(),
    "weights": lambda engine: engine.state_dict(),
    "adapters": lambda engine: engine.adapters(),
    "another engine": lambda engine: InferenceEngine(),
    "a pipeline": lambda engine: asyncio.run(Pipeline(Config()).__aenter__()),
}


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
@pytest.mark.parametrize("way", WAYS)
def test_a_fork_says_at_once_that_it_can_not_compute(engine: InferenceEngine, way: str) -> None:
    assert in_a_fork(lambda: WAYS[way](engine)) == "forked"


async def test_a_pipeline_of_the_parent_is_of_no_use_in_a_fork() -> None:
    async with Pipeline(Config()) as pipeline:

        async def submit() -> None:
            async for _ in pipeline.submit({"prompt": "1"}):
                pass

        def work() -> None:
            asyncio._set_running_loop(None)
            asyncio.new_event_loop().run_until_complete(submit())

        assert in_a_fork(work) == "forked"
        # The parent is undisturbed.
        completion = await pipeline.complete({"prompt": "98 + 25 =", "sampling": {"max_tokens": 4}})
        assert completion.status == "done"


def test_an_engine_is_left_in_a_fork_without_an_effect(engine: InferenceEngine) -> None:
    def leave() -> None:
        with engine:
            pass

    assert in_a_fork(leave) == "none"
    assert len(engine.generate(["1"], GREEDY)) == 1


class Prompts:
    """A data set whose items an engine makes."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.engine = engine

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return len(self.engine.generate([str(index)])[0].completion_tokens)


def test_a_worker_of_a_data_loader_says_so_too(engine: InferenceEngine) -> None:
    loader = DataLoader(Prompts(engine), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ModelError, match="start it by 'spawn'"):
        list(loader)
