"""Optional parts of streaming, a module for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ....bus.control import Cancel
from ....bus.messages import RequestOpened
from ....bus.public import CompletionChunk
from ....bus.sections import name_of
from ....bus.steps import StartedSequence
from ....config import Config
from ...parts import Part as BasePart
from ...parts import Parts

if TYPE_CHECKING:
    from ..deliveries import Deliveries, Ending
    from ..samples import RequestState, Sample
    from ..step import Step

FindRequest = Callable[[str, str], "RequestState | None"]
"""Returns the open request of a request id and an entry id."""


class Part(BasePart):
    """Base class of parts.

    State of a request is in `request.notes[self]`, and ends with the request. `reads` is of a
    StepResult; messages that a part handles have a `request_id` and an `entry_id`.
    """

    def opened(self, request: RequestState, deliveries: Deliveries) -> None:
        """A request has entered the lane, perhaps again in a new epoch."""

    def received(self, step: Step) -> None:
        """A step has arrived; parts of it may be held back after this."""

    def hold(self, step: Step, find: FindRequest) -> Step:
        """Keep a share of a step for later; return the rest."""
        return step

    def release(self, find: FindRequest) -> list[Step]:
        """Return the steps kept by `hold` that can be absorbed now."""
        return []

    def started(self, sample: Sample, started: StartedSequence, step: Step) -> None:
        """A sequence of a sample has started, or continues after a preemption."""

    def stepped(self, step: Step) -> None:
        """All sequences of a step have started; tokens follow."""

    def cut(self, step: Step, deliveries: Deliveries) -> Iterable[Sample]:
        """Return running samples that get none of a step's tokens: with a finish reason they end,
        without one they stop, and another sequence of theirs starts later. Halts are the part's."""
        return ()

    def read(self, section: Any, step: Step) -> Iterable[Sample]:
        """Absorb a section of the part; return samples that end with it."""
        return ()

    def finished(self, sample: Sample, unused: int, deliveries: Deliveries) -> None:
        """A sample has finished. `unused`: tokens of its last step after the one that ended it."""

    def stopped(self, sample: Sample) -> None:
        """A running sample will get no more tokens in this epoch."""

    def handle(self, message: Any, request: RequestState, deliveries: Deliveries) -> None:
        """Handle a message about an open request."""

    def completed(
        self, request: RequestState | None, cancel: Cancel | None, ending: Ending
    ) -> None:
        """Add fields to a Completion.

        Args:
            request: None for a request that is unknown here.
            cancel: The message that has ended it early; None for a request that is done.
            ending: The fields.
        """

    def dropped(self, request: RequestState) -> None:
        """A request is dropped without an output."""

    def reset(self, requests: Sequence[RequestState]) -> None:
        """A new epoch begins. `requests`: all that are open."""

    def restored(
        self,
        request: RequestState,
        before: RequestState,
        chunks: Sequence[CompletionChunk],
        now_ns: int,
    ) -> None:
        """A request was rebuilt from its chunks, in place of its state `before`."""

    def unanswered(self, request: RequestState) -> list[Any]:
        """Return messages for an executor that must be sent again in a new epoch."""
        return []


WANTED = {"ForkedAt": "forks:Forks", "VersionLagLimit": "version_lag:VersionLags"}
"""Parts, as "module:class" here, that are made for the first request with a section, by its name.
Their hooks run after those of other parts."""


class StreamingParts(Parts[Part]):
    """The parts of a core, some of which are made when they are needed."""

    def make_for(self, opened: RequestOpened) -> None:
        """Make the parts that a request needs."""
        for section in opened.parts:
            if (made_by := WANTED.get(name_of(section))) is not None:
                module, _, name = made_by.partition(":")
                kind: type[Part] = getattr(import_module(f".{module}", __name__), name)
                if self.find(kind) is None:
                    self.use((*self.all, kind()))


def make_parts(config: Config, now_ns: int) -> list[Part]:
    """Return the parts that are configured, in the order in which their hooks run."""
    from .accounts import TimeAccounts
    from .adapters import AdapterVersions
    from .embeddings import Embeddings
    from .experts import PromptRouting
    from .per_token import PerToken
    from .prompt_logprobs import PromptLogprobs
    from .sessions import Sessions

    engine = config.engine
    parts = [
        TimeAccounts(now_ns),
        PromptLogprobs(),
        PromptRouting(),
        AdapterVersions(),
        PerToken(),
        Embeddings(),
    ]
    parts.append(Sessions())
    if config.pipeline.replicas > 1:
        from .handover import StepsAhead

        parts.append(StepsAhead())
    if engine.speculation != "off":
        from .speculation import DraftCounts

        parts.append(DraftCounts())
    if engine.reference_model_path:
        from .scoring import ReferenceScores

        parts.append(ReferenceScores())
    if engine.response_cache_bytes:
        from .responses import Responses

        parts.append(Responses())
    if config.bus.trees_max_bytes:
        from .trees import Trees

        parts.append(Trees())
    if config.admission.recipes:
        from .recipes import Recipes

        parts.append(Recipes())
    return parts
