"""Whether an entry is let in: asks the core, and tells logs and traces what it says."""

from __future__ import annotations

import msgspec

from ...bus.control import Cancel
from ...config import RequestError
from ...telemetry import now_ns
from ..actor import Actor
from .checks import request_id_of
from .core import AdmissionCore, status_of
from .effects import Judge
from .events import Judged
from .measures import count_constraint
from .poison import is_of_the_entry, why_given_up
from .spans import trace_entry


def judge(stage: Actor, core: AdmissionCore, wanted: Judge) -> Judged:
    """Lets an entry in, or says what it ends with."""
    arrival = wanted.arrival
    entry = arrival.entry
    received_ns = arrival.received_ns - entry.waited_ns
    try:
        judged = _let_in(stage, core, wanted, received_ns)
    except RequestError as error:
        request_id = request_id_of(entry)
        trace = trace_entry(stage, entry, received_ns, error=error.code)
        if error.code == "invalid_constraint":
            count_constraint(stage, entry, error.code)
        log = stage.log_of(request_id, trace)
        log.info("request_refused", code=error.code, reason=error.message)
        end = (request_id, entry.entry_id, status_of(error.code), error.code, error.message)
        return Judged(arrival, end=Cancel(*end))
    except Exception as error:
        if not is_of_the_entry(error):
            raise
        return Judged(arrival, failure=why_given_up(error))
    count_constraint(stage, entry)
    return judged


def _let_in(stage: Actor, core: AdmissionCore, wanted: Judge, received_ns: int) -> Judged:
    arrival, owner = wanted.arrival, wanted.owner
    entry, tokenized = arrival.entry, arrival.tokenized
    if wanted.draining:
        core.check_owner(entry, owner)
        raise RequestError("the pipeline is shutting down", code="shutting_down")
    if isinstance(tokenized, Exception):
        core.check(entry, received_ns, now_ns(), owner=owner)
        if wanted.cancelled is None:
            raise tokenized
        return Judged(arrival, end=wanted.cancelled)
    accepted = core.admit(entry, received_ns, now_ns(), owner=owner, tokens=tokenized)
    trace = trace_entry(stage, entry, received_ns, accepted)
    if stage.config.telemetry.log_prompts:
        content = msgspec.to_builtins(entry.request)
        stage.log_of(request_id_of(entry), trace).info("request_admitted", request=content)
    leaving = accepted.leaving(now_ns(), trace.traceparent, trace.tracestate)
    return Judged(arrival, leaving, wanted.cancelled)
