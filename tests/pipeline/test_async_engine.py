"""The engine for asyncio: outputs so far, aborts, and its life in one event loop."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from nano_inference import AsyncEngine, RequestOutput, SamplingParams
from nano_inference.config import ChannelClosed

from .builders import raises

SHORT_MODEL = True

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def last(engine: AsyncEngine, params: SamplingParams, name: str | int = "") -> RequestOutput:
    return [output async for output in engine.generate("98 + 25 =", params, name)][-1]


async def test_outputs_grow_and_end_with_the_whole() -> None:
    engine = AsyncEngine("tiny")  # no `async with`: as in a notebook
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    seen = [each async for each in engine.generate("98 + 25 =", params, "r", n=2)]
    for before, after in pairwise(seen):
        assert [each.index for each in after.outputs] in ([0], [0, 1])
        for old, new in zip(before.outputs, after.outputs, strict=False):
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
            assert new.text.startswith(old.text)
    assert [each.finished for each in seen] == [False] * (len(seen) - 1) + [True]
    whole = seen[-1].completion
    assert whole is not None
    assert [each.token_ids for each in seen[-2].outputs] == [s.token_ids for s in whole.samples]
    assert seen[-1].prompt_token_ids == whole.prompt_token_ids != ()
    assert {each.finish_reason for each in seen[-1].outputs} == {"length"}
    assert (await last(engine, params, 5)).request_id == "5"
    for prompt in ["a", "b"], {"prompt": "a"}:
        with raises("invalid_prompt", "call generate for each|pass the text of its prompt"):
            await anext(engine.generate(prompt, params))  # type: ignore[arg-type]
    aborting = engine.generate("98 + 25 =", LONG, "a")
    begun = await anext(aborting)
    await engine.abort(["a", "unknown"])
    aborted = [begun, *[each async for each in aborting]][-1]
    assert aborted.finished
    assert [each.finish_reason for each in aborted.outputs] == ["abort"]
    with raises("invalid_request_id"):
        await last(engine, params, "\n")
    task = asyncio.create_task(last(engine, LONG))
    await asyncio.sleep(0)
    await engine.shutdown()
    with pytest.raises((ChannelClosed, RuntimeError)):
        await task
    with pytest.raises(RuntimeError, match="was shut down"):
        await engine.start()


def test_another_event_loop_is_refused() -> None:
    engine = AsyncEngine("tiny")
    asyncio.run(last(engine, SamplingParams(max_tokens=1)))  # and no shutdown
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(last(engine, SamplingParams(max_tokens=1)))
    asyncio.run(engine.shutdown())
