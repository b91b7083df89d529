"""The way of a model's requests to the engine, the same as that of all interfaces."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence

from .....bus.public import Completion, EmbedParams, GenerateRequest
from .....config import Config
from .....pipeline.embedding import EmbeddedPrompt
from ....serving.embedding import EmbedCall, Prompt, embed_all
from ....serving.lane_state import Readiness
from ....serving.samples import complete_sample, stream_unsent
from ....serving.submissions import Submissions
from ....serving.words import LazyWords
from ..served import ModelCall
from .inputs import Sampling, cache_salt_of, priority_of
from .parts import Part, Parts


class Lane:
    """What the models have in common that the lanes behind a gateway answer.

    Attributes:
        name: Of the engine's model.
        words: Its tokenizer.
        max_samples: Of one request.
        most_at_once: Samples that the engine makes of one prompt, and the setting that says so.
        max_model_len: Gives how many tokens prompt and completion may have together.
        trouble: Why a request would not be served now; as `ServedModel.trouble`.
    """

    def __init__(
        self, submissions: Submissions, config: Config, words: LazyWords, readiness: Readiness
    ) -> None:
        self.name = config.engine.model_name
        self.words = words
        self.max_samples = config.gateway.max_prompts
        self.most_at_once = min(
            (config.gateway.max_prompts, "gateway.max_prompts"),
            (config.admission.max_samples, "admission.max_samples"),
        )
        self.max_model_len = submissions.length.get
        self.trouble = readiness.trouble
        self._submissions = submissions

    async def request(
        self, call: ModelCall, prompt: Prompt, sampling: Sampling, *, stream: bool = False
    ) -> GenerateRequest:
        """What is submitted for a call.

        Raises:
            RequestError: A parameter is of the wrong type, or it is too large.
        """
        request = GenerateRequest(
            # Clients may use an id for many requests, and others may use the same.
            request_id=f"kserve-{uuid.uuid4().hex}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            n=sampling.n,
            sampling=sampling.params,
            stream=stream,
            priority=priority_of(call.request),
            tenant=call.origin.tenant,
            cache_salt=cache_salt_of(call.request),
        )
        self._submissions.check_priority(call.origin.caller, request)
        self._submissions.check_size(request, await self.max_model_len())
        self._submissions.check_encoded(request)
        return request

    async def complete(
        self, call: ModelCall, request: GenerateRequest, before: str = ""
    ) -> Completion:
        """Runs a request, and gives its end.

        Args:
            before: What of the prompt the answer shows before each sample.

        Raises:
            NanoInferenceError: The engine did not do it.
        """
        completion = await complete_sample(self._submissions, call.origin, request, before=before)
        _tell_times(call, completion)
        return completion

    async def embed(
        self, call: ModelCall, prompts: Sequence[Prompt], params: EmbedParams
    ) -> list[EmbeddedPrompt]:
        """The vectors of prompts, in order.

        Raises:
            RequestError: A parameter is of the wrong type, or a prompt is refused.
            NanoInferenceError: The engine did not do it.
        """
        wanted = EmbedCall(
            id=f"kserve-{uuid.uuid4().hex}",
            params=params,
            priority=priority_of(call.request),
            cache_salt=cache_salt_of(call.request),
        )
        return await embed_all(self._submissions, call.origin, wanted, prompts)

    async def stream(
        self,
        call: ModelCall,
        request: GenerateRequest,
        take: Callable[[Sequence[Part]], Awaitable[None]],
    ) -> None:
        """Runs a request, and hands over what comes of its samples as fast as it is taken.

        Raises:
            NanoInferenceError: The engine did not do it. All that came before was handed over.
        """
        parts = Parts(request.n, take)
        completion = await stream_unsent(self._submissions, call.origin, request, parts)
        _tell_times(call, completion)


def _tell_times(call: ModelCall, completion: Completion) -> None:
    """How long it was computed, on the clock of the lane alone."""
    timings = completion.timings
    if (executor := timings.of("executor")) is not None:
        call.computed(timings.finished_ns - executor.start_ns)
