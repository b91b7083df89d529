"""What whoever can complete requests can do with them: score completions, embed prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..bus.public import Completion, EmbedParams, GenerateRequest
from ..config import SamplingParams
from .embedding import EmbeddedPrompt, embed_by
from .rollouts import Prompt
from .scoring import ScoredCompletion, score_by

Request = GenerateRequest | dict[str, Any]


class Completing(ABC):
    """Publishes requests and waits for their terminal messages."""

    @abstractmethod
    async def complete(self, request: Request | bytes) -> Completion:
        """Publishes a request and waits for its terminal message."""

    async def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        like: GenerateRequest = GenerateRequest(),  # noqa: B008  (it is frozen)
    ) -> list[ScoredCompletion]:
        """How likely the weights in place and the reference model find given completions, in order.

        Each is a request like any other, and the numbers are those of `InferenceEngine.score`.

        Args:
            prompts: Token ids.
            completions: Token ids, at least one for each prompt.
            sampling_params: One for all, or one for each, of which only the temperature counts.
            like: Its tenant, priority, budget_ns, model and cache_salt are those of the requests.

        Raises:
            RequestError: A request was refused or did not end well, and the others are cancelled;
                or there are not as many completions as prompts, or one is empty.
        """
        return await score_by(self.complete, prompts, completions, sampling_params, like)

    async def embed(
        self,
        prompts: Sequence[Prompt],
        params: EmbedParams = EmbedParams(),  # noqa: B008  (it is frozen)
        *,
        return_errors: bool = False,
        like: GenerateRequest = GenerateRequest(),  # noqa: B008  (it is frozen)
    ) -> list[EmbeddedPrompt]:
        """The vectors of prompts, in order.

        Each is a request like any other, and the numbers are those of `InferenceEngine.embed`.

        Args:
            prompts: Texts, or token ids.
            params: How they are pooled.
            return_errors: Whether a prompt that is refused, or does not end well, has its `error`
                among the vectors, and the others go on.
            like: As for `score`.

        Raises:
            RequestError: A request was refused or did not end well, and errors are not returned;
                the others are cancelled.
        """
        return await embed_by(self.complete, prompts, params, like, return_errors=return_errors)
