"""Optional parts of admission, a module for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ....bus.control import ReplicaCapacity
from ....bus.entries import RequestEntry
from ....bus.messages import AdmittedRequest, Prompt, RequestOpened, StoredResponse
from ....bus.pooling import Pooling
from ....bus.public import GenerateRequest
from ....bus.sections import Section
from ....config import Config, SamplingParams
from ....text.image_tokens import Expanded
from ...parts import Part as BasePart
from ..arrivals import Accepted, PromptImage, ResponseKey

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ....text.images import ImageProcessor
    from ..prompts import PromptReader


class Part(BasePart):
    """Base class of parts.

    Attributes:
        fields: Fields of GenerateRequest; if one of them is given, the hooks `check`, `prepare` and
            `read` run for the request.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def set_capacity(self, capacity: ReplicaCapacity) -> None:
        """The lane has this capacity."""

    def weights_changed(self, capacity: ReplicaCapacity) -> None:
        """The lane has other weights, or computes in another mode."""

    def resolve(self, entry: RequestEntry, request: GenerateRequest) -> str:
        """Return the adapter of a request; "" for none."""
        return ""

    def check(self, request: GenerateRequest, capacity: ReplicaCapacity) -> None:
        """Check the part's fields, but no text."""

    def check_size(self, reader: PromptReader) -> None:
        """Check whether the part's texts may fit, before they are tokenised."""

    def prepare(self, request: GenerateRequest) -> None:
        """Do the part's slow checks; in any thread."""

    def read(
        self, reader: PromptReader, prompt: Expanded, media: Sequence[PromptImage]
    ) -> Section | None:
        """Return the part's section of the AdmittedRequest; in any thread."""

    def pool(
        self, request: GenerateRequest, num_prompt_tokens: int, capacity: ReplicaCapacity
    ) -> tuple[SamplingParams, Pooling] | None:
        """Return the sampling and pooling of a request that asks for its prompt's vector."""

    def opened(
        self,
        entry: RequestEntry,
        request: GenerateRequest,
        adapter: str,
        prompt: Prompt,
        sampling: SamplingParams,
        pooling: Pooling | None,
        seeds: tuple[int, ...],
    ) -> Section | None:
        """Return the part's section of the RequestOpened, for a valid request."""

    def key(
        self, request: GenerateRequest, opened: RequestOpened, admitted: AdmittedRequest
    ) -> ResponseKey | None:
        """Return the request's key in the response cache; None if it can't be there."""

    def look_up(self, accepted: Accepted) -> Section | None:
        """Return a section of the RequestOpened that is made when the request enters the lane."""

    def finished(self, accepted: Accepted, response: StoredResponse) -> None:
        """A request has ended with a response that may be kept."""

    def close(self) -> None:
        """End processes."""


def make_parts(
    config: Config,
    tokenizer: PreTrainedTokenizerFast | None,
    processor: ImageProcessor | None,
) -> list[Part]:
    """Return the parts that are configured, in the order in which their hooks run.

    Args:
        config: All settings.
        tokenizer: None for a model without one.
        processor: None for a model without images.
    """
    from .accounts import Accounts
    from .adapters import Adapters
    from .constraints import Constraints
    from .embeddings import Embeddings
    from .forks import Forks
    from .images import Images
    from .sessions import Sessions
    from .speculation import Predictions
    from .version_lag import VersionLags

    engine = config.engine
    has_reference = bool(engine.reference_model_path)
    adapters = Adapters(engine.model_name, {"", engine.model_name, *engine.model_aliases})
    parts: list[Part] = [
        adapters,
        Sessions(),
        Embeddings(engine.model_name, config.bus.max_result_bytes),
        Images(config.images, processor, engine.model_name, has_reference=has_reference),
        Constraints(config, tokenizer),
        Predictions(engine),
        Accounts(),
        Forks(),
        VersionLags(),
    ]
    if has_reference:
        from .scoring import Reference

        parts.append(Reference())
    if config.admission.recipes:
        from .recipes import Recipes

        parts.append(Recipes())
    if config.bus.trees_max_bytes:
        from .trees import Trees

        parts.append(Trees())
    else:
        from .trees_off import NoTrees

        parts.append(NoTrees())
    if engine.response_cache_bytes:
        from .responses import Responses

        parts.append(Responses(engine, adapters))
    return parts
