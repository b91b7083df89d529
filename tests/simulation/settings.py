"""The settings of a story's programs, and its requests as messages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from nano_inference.bus.public import GenerateRequest
from nano_inference.config import (
    AdmissionConfig,
    BatchesConfig,
    BusConfig,
    Config,
    Constraint,
    EngineConfig,
    FairnessConfig,
    GatewayConfig,
    PipelineConfig,
    SamplingParams,
    split_role,
)

from .redis.network import MS
from .story import LEASE_MS, Request, Story

AUDIT_EVERY = 20
"""One of so many blocks loaded from a tier is computed again."""


@lru_cache(maxsize=1024)
def config_of(story: Story, program: str) -> Config:
    """Return the settings of a program of a story."""
    lane, _, role = program.partition("/")
    stage, replica = split_role(role) if role else ("", 0)
    split: dict[str, Any] = {"stages": (stage,), "replica": replica} if role else {}
    return Config(
        engine=EngineConfig(
            block_size=story.block_size,
            cache_type=story.cache_type,
            max_tokens_per_batch=story.max_tokens_per_batch,
            adapters={id: folder_of(number) for number, id in enumerate(story.adapters, 1)},
            speculation="auto" if story.drafts else "off",
            max_draft_tokens=story.drafts or 1,
            kv_audit_every=AUDIT_EVERY,
            state_snapshot_blocks=story.snapshot_blocks,
        ),
        bus=BusConfig(url=url_of(story.bus == "redis"), lane=lane),
        admission=AdmissionConfig(max_in_flight=story.max_in_flight, lease_s=LEASE_MS / 1000),
        fairness=FairnessConfig(
            max_timeslice_tokens=story.slice_tokens,
            tenant_timeslice_tokens=story.tenant_slice_tokens,
            enable_preemption=story.preempts,
        ),
        batches=BatchesConfig(segment_lines=3, lease_s=2, max_in_flight=6),
        gateway=GatewayConfig(resume_grace_s=story.grace_ms / 1000),
        pipeline=PipelineConfig(
            replicas=story.replicas, roles=story.roles, max_restarts=1000, **split
        ),
    )


def url_of(on_redis: bool) -> str:
    """Return the bus's URL."""
    return "redis://simulated:6379" if on_redis else BusConfig().url


def folder_of(number: int) -> str:
    """Return the folder of weights or of an adapter that consists of a number."""
    return f"/weights/{number}"


def message_of(request: Request) -> GenerateRequest:
    """Return a request as it is published."""
    return GenerateRequest(
        request_id=request.name,
        model=request.adapter,
        prompt_token_ids=request.prompt,
        n=request.n,
        sampling=SamplingParams(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            seed=request.seed,
            temperature=request.temperature,
            stop_token_ids=frozenset(request.stop_ids),
            ignore_eos=not request.constraint,
            constraint=Constraint(regex=request.constraint) if request.constraint else None,
        ),
        stream=request.stream,
        tenant=request.tenant,
        priority=request.priority,
        budget_ns=request.budget_ms * MS if request.budget_ms else None,
    )
