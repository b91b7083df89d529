"""An engine for asyncio: each request is a loop over its outputs. For notebooks and services."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from os import PathLike
from typing import TYPE_CHECKING, Any

import msgspec

from ..bus.public import Completion, CompletionChunk, FinishReason, GenerateRequest
from ..config import ChannelClosed, Config, EngineConfig, RequestError, SamplingParams
from .engine_calls import says_other_names
from .engine_requests import ArgumentError, prompt_fields, prompt_of
from .pipeline import Pipeline
from .rollouts import Prompt, RequestId

if TYPE_CHECKING:
    from .chat_renderer import ChatPrompt


_FIELDS = {*GenerateRequest.__struct_fields__}
_FIELDS -= {"prompt", "prompt_token_ids", "sampling", "request_id"}


class SampleOutput(msgspec.Struct, frozen=True):
    """The output of one sample so far.

    Attributes:
        index: Index of the sample, below n.
        text: The text so far.
        token_ids: `[k]`, the tokens so far, stop tokens included.
        logprobs: `[k]`, one per token.
        finish_reason: None while the sample runs.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None


class RequestOutput(msgspec.Struct, frozen=True):
    """The outputs of a request so far.

    Attributes:
        request_id: The request's id.
        outputs: The samples, in order; those that have not begun are absent.
        finished: Whether this is the last one.
        completion: The terminal message, with usage, times and all else; None before the end.
    """

    request_id: str
    outputs: tuple[SampleOutput, ...]
    finished: bool = False
    completion: Completion | None = None

    def __repr__(self) -> str:
        outputs = ", ".join(
            f"{each.text!r} <{len(each.token_ids)} tokens>" for each in self.outputs
        )
        state = "finished" if self.finished else "unfinished"
        return f"RequestOutput({self.request_id!r}, [{outputs}], {state})"

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """`[prompt]`, once the request is finished."""
        return () if self.completion is None else self.completion.prompt_token_ids


class AsyncEngine:
    """A Pipeline in this process, whose requests are loops over their outputs.

    ```python
    engine = AsyncEngine("tiny")
    async for output in engine.generate("98 + 25 =", SamplingParams(temperature=0)):
        print(output.outputs[0].text)
    await engine.shutdown()
    ```

    Requests of all tasks are batched together. The engine starts with its first request, or as
    `async with AsyncEngine("tiny") as engine`, and belongs to the event loop that started it.
    """

    @says_other_names
    def __init__(self, config: Config | EngineConfig | str | PathLike[str] | None = None) -> None:
        """An engine that has not started.

        Args:
            config: The settings, those of the engine, or a model's path alone.

        Raises:
            ConfigError: `config` is none of these.
        """
        if not isinstance(config, Config):
            config = Config(engine=EngineConfig.of(config))
        self.config = config
        self._pipeline: Pipeline | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._is_shut_down = False
        self._running = set[str]()
        self._aborted = set[str]()

    def __repr__(self) -> str:
        state = "shut down" if self._is_shut_down else f"unfinished={len(self._running)}"
        return f"AsyncEngine({self.config.engine.model_path!r}, {state})"

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def start(self) -> Pipeline:
        """Start the stages, unless they run; return the pipeline, which has all other calls.

        Raises:
            ModelError: The model can't be loaded.
            RuntimeError: The engine was shut down, or runs in another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._is_shut_down:
            raise RuntimeError("this engine was shut down; make another one")
        if self._loop not in (None, loop):
            raise RuntimeError(
                "this engine belongs to another event loop; make one in each, or use one loop "
                "(asyncio.run) for all requests"
            )
        self._loop = loop
        async with self._starting:
            if self._pipeline is None:
                self._pipeline = await Pipeline(self.config).__aenter__()
        return self._pipeline

    async def generate(
        self,
        prompt: Prompt | ChatPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: RequestId = "",
        **fields: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request so far, each time that there are more.

        A loop that ends early cancels the request.

        Args:
            prompt: Text, token ids, or a conversation that a ChatRenderer has rendered.
            sampling_params: The defaults when None.
            request_id: Its id, for `abort`, of no other unfinished request, as text or an integer,
                which becomes text; generated when empty.
            fields: More fields of GenerateRequest: `n` for so many samples, `priority`, `tenant`.

        Raises:
            RequestError: The request is refused, or has failed; `code` and message give the reason.
            StageFailed: The pipeline has failed.
        """
        if not fields.keys() <= _FIELDS:
            from ..config.other_names import unknown_argument

            known = {*_FIELDS, "sampling_params"}
            sampling = SamplingParams.__struct_fields__
            unknown = unknown_argument("AsyncEngine.generate", fields, known, (), sampling)
            raise unknown or AssertionError
        params = sampling_params or SamplingParams()
        request = GenerateRequest(
            **prompt_fields(_one_prompt(prompt)),
            sampling=params,
            request_id=uuid.uuid4().hex if request_id == "" else str(request_id),
            **fields,
        )
        pipeline, name = await self.start(), request.request_id
        samples: dict[int, SampleOutput] = {}
        self._running.add(name)
        try:
            async with aclosing(pipeline.submit(request)) as outputs:
                async for output in outputs:
                    if isinstance(output, Completion):
                        yield _last(output)
                        return
                    if name in self._aborted:  # before admission, perhaps
                        await pipeline.client.cancel(name)
                    before = samples.get(output.sample_index) or SampleOutput(output.sample_index)
                    samples[output.sample_index] = _with(before, output)
                    yield RequestOutput(name, tuple(samples[place] for place in sorted(samples)))
        except ChannelClosed:
            if not self._is_shut_down:
                await pipeline.failed()
            raise
        finally:
            self._running.discard(name)
            self._aborted.discard(name)

    async def abort(self, request_id: RequestId | Sequence[RequestId]) -> None:
        """End requests early: their loops get the output so far, with the finish reason "abort".

        Unknown ids are ignored.
        """
        for each in [request_id] if isinstance(request_id, RequestId) else request_id:
            name = str(each)
            if self._pipeline is not None and name in self._running:
                self._aborted.add(name)
                await self._pipeline.client.cancel(name)

    async def shutdown(self) -> None:
        """Stop the stages and free their memory; unfinished requests end. A second call does
        nothing."""
        self._is_shut_down = True
        pipeline, self._pipeline = self._pipeline, None
        # The end of a loop has stopped its pipeline.
        if pipeline is not None and self._loop is asyncio.get_running_loop():
            await pipeline.__aexit__()


def _one_prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list | tuple) and any(isinstance(each, str) for each in prompt):
        raise ArgumentError(
            f"prompt is a list of {len(prompt)} texts; call generate for each, by asyncio.gather "
            "or tasks, and they run as one batch",
            code="invalid_prompt",
        )
    return prompt_of(prompt)


def _with(before: SampleOutput, chunk: CompletionChunk) -> SampleOutput:
    return SampleOutput(
        before.index,
        before.text + chunk.text,
        before.token_ids + chunk.token_ids,
        before.logprobs + chunk.logprobs,
        chunk.finish_reason,
    )


def _last(completion: Completion) -> RequestOutput:
    """Raises RequestError for a failed request."""
    if completion.error is not None and completion.status != "cancelled":
        raise RequestError(completion.error.message, code=completion.error.code)
    return RequestOutput(
        completion.request_id,
        tuple(
            SampleOutput(
                each.sample_index, each.text, each.token_ids, each.logprobs, each.finish_reason
            )
            for each in completion.samples
        ),
        finished=True,
        completion=completion,
    )
