"""Requests for the fairness core, and what it says of them."""

from __future__ import annotations

import itertools

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import (
    AdmittedRequest,
    Credit,
    RequestInfo,
    ResumeSequences,
    SequenceSpec,
)
from nano_inference.config import SamplingParams
from nano_inference.stages.fairness import FairnessCore

SECOND = 1_000_000_000

_ids = itertools.count(1)


def request(
    name: str,
    *,
    priority: int = 0,
    samples: int = 1,
    tenant: str = "default",
    prompt: tuple[int, ...] = (1,),
    sampling: SamplingParams | None = None,
) -> AdmittedRequest:
    info = RequestInfo(name, f"entry-{name}", "m", samples, True, (), len(prompt), "", "", 0)
    sequences = tuple(SequenceSpec(next(_ids), index, 0) for index in range(samples))
    sampling = sampling or SamplingParams()
    return AdmittedRequest(info, prompt, sampling, sequences, tenant, priority)


def cancel(name: str) -> Cancel:
    return Cancel(name, f"entry-{name}", "cancelled", "cancelled", "")


def grant(core: FairnessCore, number: int, now_ns: int = 0) -> None:
    core.absorb(Credit(number), now_ns)


def drain(core: FairnessCore, now_ns: int = 0) -> list[str]:
    """The requests that are dispatched now; "name+" for a sequence that goes on."""
    names = []
    while (dispatched := core.pop(now_ns)) is not None:
        again = "+" if isinstance(dispatched.message, ResumeSequences) else ""
        names.append(dispatched.request.info.request_id + again)
    return names
