"""Sections of messages by short names, for tests that write a message's fields in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from nano_inference.bus.media import MediaItem
from nano_inference.bus.messages import AdmittedRequest
from nano_inference.bus.parts.accounts import RequestTimes
from nano_inference.bus.parts.adapters import AdaptersPlan, AdaptersResult
from nano_inference.bus.parts.columns import TokenColumns
from nano_inference.bus.parts.embeddings import PooledResult
from nano_inference.bus.parts.experts import RoutedPrompts
from nano_inference.bus.parts.handover import HandoverRoute, leaving_of
from nano_inference.bus.parts.images import ImagesPlan, ImagesResult, PromptMedia
from nano_inference.bus.parts.memory import ReleasePlan
from nano_inference.bus.parts.responses import ResponseCaching
from nano_inference.bus.parts.scoring import PromptLogprobs, PromptScores, ReferenceScoring
from nano_inference.bus.parts.speculation import DraftsPlan, DraftsResult, Prediction, VerifiedDraft
from nano_inference.bus.parts.tiers import TiersPlan
from nano_inference.bus.parts.weights import WeightsPlan
from nano_inference.bus.sections import Section
from nano_inference.bus.steps import KVMove, StepPlan, StepResult
from nano_inference.bus.times import StepTimes

PLAN: dict[str, Callable[[Any], Section]] = {
    "weight_version": WeightsPlan,
    "release": ReleasePlan,
    "adapters": AdaptersPlan,
    "num_drafts": DraftsPlan,
    "kv_moves": TiersPlan,
    "kv_offers": lambda offers: TiersPlan(offers=offers),
    "encodes": lambda encodes: ImagesPlan(encodes=encodes),
}
RESULT: dict[str, Callable[[Any], Section]] = {
    "prompt_logprobs": PromptScores,
    "experts": RoutedPrompts,
    "targets": lambda targets: PromptScores((), (targets,)),
    "adapter_versions": AdaptersResult,
    "pooled": PooledResult,
    "drafts": DraftsResult,
    "spoiled": ImagesResult,
    "times": lambda times: times,
    "columns": TokenColumns,
}
OPENED: dict[str, Callable[[Any], Section]] = {
    "ref_temperature": ReferenceScoring,
    "keeps": ResponseCaching,
    "response": lambda response: ResponseCaching(0, response),
    "recipe": lambda recipe: recipe,
    "lag": lambda limit: limit,
}
TIMES = ("queued_ns", "waited_ns", "down_since_ns")


def drafts_of(result: StepResult) -> tuple[VerifiedDraft, ...]:
    found = DraftsResult.find(result.parts)
    return found.verified if found is not None else ()


def columns_of(result: StepResult) -> dict[str, tuple[Any, ...]]:
    found = TokenColumns.find(result.parts)
    return found.columns if found is not None else {}


def prompt_logprobs_of(result: StepResult) -> tuple[PromptLogprobs, ...]:
    found = PromptScores.find(result.parts)
    return found.prompts if found is not None else ()


def in_parts(fields: dict[str, Any], makers: dict[str, Callable[[Any], Section]]) -> dict[str, Any]:
    """Return fields of a message with those that `makers` names as sections in `parts`."""
    own = {name: value for name, value in fields.items() if name not in (*makers, *TIMES)}
    sections = [make(fields[name]) for name, make in makers.items() if fields.get(name) is not None]
    if times := {name: fields[name] for name in TIMES if name in fields}:
        sections.append(RequestTimes(**times))
    return {**own, "parts": tuple(sections)}


def successors_of(request: AdmittedRequest) -> tuple[int, ...]:
    """The replicas that continue a request's sequences; empty if they stay."""
    found = HandoverRoute.find(request.parts)
    return found.successors if found is not None else ()


def prediction_of(request: AdmittedRequest) -> tuple[int, ...]:
    found = Prediction.find(request.parts)
    return found.token_ids if found is not None else ()


def media_of(request: AdmittedRequest) -> tuple[MediaItem, ...]:
    found = PromptMedia.find(request.parts)
    return found.items if found is not None else ()


class Planned(NamedTuple):
    """The fields of a plan's sections, as in their classes."""

    weight_version: int
    release: tuple[str, ...]
    adapters: tuple[tuple[str, int], ...]
    num_drafts: tuple[int, ...]
    kv_moves: tuple[KVMove, ...]
    kv_offers: tuple[KVMove, ...]
    handovers: tuple[tuple[int, int, int], ...]
    forgotten_images: tuple[tuple[str, int], ...]
    encodes: tuple[MediaItem, ...]
    times: StepTimes


def read(plan: StepPlan) -> Planned:
    """Return the fields of a plan's sections."""
    parts = plan.parts
    tiers, images = TiersPlan.find(parts) or TiersPlan(), ImagesPlan.find(parts) or ImagesPlan()
    return Planned(
        weight_version=(WeightsPlan.find(parts) or WeightsPlan(0)).version,
        release=(ReleasePlan.find(parts) or ReleasePlan(())).tags,
        adapters=(AdaptersPlan.find(parts) or AdaptersPlan(())).changes,
        num_drafts=(DraftsPlan.find(parts) or DraftsPlan(())).num_tokens,
        kv_moves=tiers.moves,
        kv_offers=tiers.offers,
        handovers=leaving_of(parts),
        forgotten_images=images.forgotten,
        encodes=images.encodes,
        times=StepTimes.find(parts) or StepTimes(len(plan.seq_ids)),
    )
