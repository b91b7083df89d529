"""Sessions: what a pipeline keeps of their requests in token trees."""

from __future__ import annotations

from typing import Any

import pytest

from nano_inference import Completion, Pipeline, RequestError
from nano_inference.bus.public import Output
from nano_inference.stages.streaming.stage import StreamingStage

from .builders import Boom, asking, end_of, error_code
from .conftest import MakeConfig, both_buses

SHORT_MODEL = True


def turn(prompt: list[int], session: str = "s", **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.9, "max_tokens": 5, "ignore_eos": True}
    about = {"session": {"id": session}, "sampling": sampling, "tenant": "t"}
    return {"prompt_token_ids": prompt, **about, **more}


async def run(pipeline: Pipeline, request: dict[str, Any]) -> Completion:
    return await end_of(pipeline.submit(request))


@both_buses()
async def test_a_session_has_all_that_its_requests_rendered_and_sampled(
    make_config: MakeConfig,
) -> None:
    async with Pipeline(make_config(bus__trees_max_bytes=1 << 20)) as pipeline:
        first = await run(pipeline, turn([5, 6, 7], n=2))
        kept = [5, 6, 7, *first.samples[1].token_ids, 9, 9]
        second = await run(pipeline, turn(kept))
        other = await run(pipeline, turn([5, 6, 8], "other"))
        await run(pipeline, asking())
        tree = await pipeline.token_tree("s", tenant="t")
        samples = sorted(tree.samples(), key=lambda each: len(each.token_ids))
        alone, whole = samples
        assert alone.token_ids == [5, 6, 7, *first.samples[0].token_ids]
        assert whole.token_ids == [*kept, *second.samples[0].token_ids]
        assert whole.loss_mask == [0] * 3 + [1] * 5 + [0] * 2 + [1] * 5
        expected = [*first.samples[1].logprobs, *second.samples[0].logprobs]
        assert [value for value in whole.logprobs if value] == expected
        assert [each.request_id for each in whole.spans] == [first.entry_id, second.entry_id]
        (path,) = (await pipeline.token_tree("other", tenant="t")).samples()
        assert path.token_ids == [5, 6, 8, *other.samples[0].token_ids]

        with pytest.raises(RequestError) as refused:
            await pipeline.token_tree("s")
        assert refused.value.code == "unknown_session", "it is another tenant's"
        assert await pipeline.delete_session("s", tenant="t")
        assert not await pipeline.delete_session("s", tenant="t")


@both_buses()
async def test_a_failure_before_the_delivery_keeps_a_turn_once(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn was kept, and the stage dies before its Completion is written."""
    original, failed = StreamingStage._deliver, list[Any]()

    async def deliver(self: StreamingStage, outputs: Any, epoch: int) -> frozenset[str]:
        ends: list[Output] = [some[-1] for _, some in outputs]
        if not failed and any(isinstance(each, Completion) for each in ends):
            failed.append(await self.bus.store.trees.read("t", "s"))
            raise Boom
        return await original(self, outputs, epoch)

    monkeypatch.setattr(StreamingStage, "_deliver", deliver)
    config = make_config(bus__trees_max_bytes=1 << 20, pipeline__restart_backoff_s=0.01)
    async with Pipeline(config) as pipeline:
        found = await run(pipeline, turn([5, 6, 7], stream=True))
        (before,) = failed[0].turns
        tree = await pipeline.token_tree("s", tenant="t")
        assert [each.key for each in tree.turns] == [before.key]
        (path,) = tree.samples()
        assert path.token_ids == [5, 6, 7, *found.samples[0].token_ids]


async def test_what_can_not_be_kept_is_refused(make_config: MakeConfig) -> None:
    async with Pipeline(make_config()) as pipeline:
        assert error_code(await run(pipeline, turn([5]))) == "token_trees_off"
    async with Pipeline(make_config(bus__trees_max_bytes=1 << 20)) as pipeline:
        for bad in ("", "x" * 129, "a\nb"):
            assert error_code(await run(pipeline, turn([5], bad))) == "invalid_session"
