"""Admits an entry or refuses it, with its log lines, its span and its counts."""

from __future__ import annotations

import msgspec

from ...bus.control import Cancel
from ...bus.entries import Malformed
from ...bus.public import GenerateRequest, ImageInput
from ...config import RequestError
from ...telemetry import now_ns
from ..actor import Actor
from .arrivals import Judged
from .checks import check_owner, request_id_of
from .core import AdmissionCore, status_of
from .effects import Judge
from .measures import EntryTrace, count_constraint
from .refusals import is_of_the_entry, why_given_up


def judge(stage: Actor, core: AdmissionCore, wanted: Judge) -> Judged:
    """Admit an entry, or return its end."""
    arrival = wanted.arrival
    entry = arrival.entry
    received_ns = arrival.received_ns - entry.waited_ns
    trace = EntryTrace(stage, entry, received_ns)
    try:
        judged = _admit(stage, core, wanted, trace)
    except RequestError as error:
        trace.end(error=error.code)
        if error.code == "invalid_constraint":
            count_constraint(stage, entry, error.code)
        request_id = request_id_of(entry)
        log = stage.log_of(request_id, trace.context)
        log.info("request_refused", code=error.code, reason=str(error))
        end = (request_id, entry.entry_id, status_of(error.code), error.code, error.message)
        return Judged(arrival, end=Cancel(*end, retry_after_s=error.retry_after_s))
    except Exception as error:
        if not is_of_the_entry(error):
            raise
        return Judged(arrival, failure=why_given_up(error))
    count_constraint(stage, entry)
    return judged


def without_files(request: GenerateRequest | Malformed) -> GenerateRequest | Malformed:
    """Return a request without the content of its images, for a log."""
    if isinstance(request, Malformed) or not request.images:
        return request
    images = tuple(ImageInput(id=image.id) for image in request.images)
    return msgspec.structs.replace(request, images=images)


def _admit(stage: Actor, core: AdmissionCore, wanted: Judge, trace: EntryTrace) -> Judged:
    arrival, owner, received_ns = wanted.arrival, wanted.owner, trace.received_ns
    entry, tokenized = arrival.entry, arrival.tokenized
    if wanted.draining:
        check_owner(entry, owner)
        raise RequestError(
            "the pipeline is shutting down",
            code="shutting_down",
            remedy="send it again, to another one",
        )
    if isinstance(tokenized, Exception):
        core.check(entry, received_ns, now_ns(), owner=owner)
        if wanted.cancelled is None:
            raise tokenized
        return Judged(arrival, end=wanted.cancelled)
    context = trace.context
    accepted = core.admit(
        entry,
        received_ns,
        now_ns(),
        owner=owner,
        tokens=tokenized,
        trace=(context.traceparent, context.tracestate),
    )
    opened, admitted = accepted.opened, accepted.admitted
    trace.end(opened, admitted)
    if stage.config.telemetry.log_prompts:
        content = msgspec.to_builtins(without_files(entry.request))
        stage.log_of(request_id_of(entry), context).info("request_admitted", request=content)
    opened = msgspec.structs.replace(opened, admitted_ns=now_ns())
    return Judged(arrival, accepted._replace(opened=opened), wanted.cancelled)
