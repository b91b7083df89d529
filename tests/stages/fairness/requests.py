"""Requests for the fairness core, and its dispatches."""

from __future__ import annotations

import itertools

from nano_inference.bus.control import Cancel
from nano_inference.bus.messages import (
    AdmittedRequest,
    Credit,
    Prompt,
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
    info = RequestInfo(name, f"entry-{name}")
    sequences = tuple(SequenceSpec(next(_ids), index, 0) for index in range(samples))
    sampling = sampling or SamplingParams()
    return AdmittedRequest(info, Prompt(prompt), sampling, sequences, tenant, priority)


def cancel(name: str) -> Cancel:
    return Cancel(name, f"entry-{name}", "cancelled", "cancelled", "")


def grant(core: FairnessCore, number: int, now_ns: int = 0) -> None:
    core.absorb(Credit(number), now_ns)


def drain(core: FairnessCore, now_ns: int = 0) -> list[str]:
    """The requests dispatched now; "name+" for a resumed sequence."""
    names = []
    while (dispatched := core.pop(now_ns)) is not None:
        again = "+" if isinstance(dispatched.message, ResumeSequences) else ""
        names.append(dispatched.request.info.request_id + again)
    return names


def served(core: FairnessCore) -> dict[tuple[int, str], float]:
    """The counters of tenants that wait, run or are ahead, by priority and tenant."""
    for replica in core.replicas.values():
        core.count(replica)
    return {
        (priority_class.priority, flow.tenant): flow.counter
        for priority_class in core.queue._classes.values()
        for flow in priority_class.flows()
    }
