"""Results of streaming's core: outputs for clients, and messages for other stages."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...bus.control import Cancel, ScoreSample
from ...bus.messages import RequestOpened, StoredResponse
from ...bus.public import Completion, ErrorInfo, Output, StageTime, Timings, Usage
from .samples import RequestState

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")


class EndedRequest(NamedTuple):
    """A request that has ended, for telemetry and for admission.

    Attributes:
        opened: None for a request that ended before any of its sequences ran.
        restored: Begun by a predecessor of this stage: of its times only `received_ns` and
            `finished_ns` are known.
        last_token_ns: When its last token was delivered; 0 if this object has delivered none.
        response: As in RequestFinished.
        tenant: Tenant of the request; "" if unknown.
    """

    opened: RequestOpened | None
    completion: Completion
    restored: bool = False
    last_token_ns: int = 0
    response: StoredResponse | None = None
    tenant: str = ""


@dataclass(slots=True)
class Deliveries:
    """Results of one message.

    Attributes:
        now_ns: When it was absorbed.
        replica: Replica that computed the step.
        outputs: New outputs by the key of their result stream, in order.
        halts: Sequences that met a stop string, which the executor still runs.
        ended: Requests that have ended, one for each Completion in `outputs`.
        to_score: Finished samples that the reference model is to score.
        retracted: Indices of samples that are to begin anew, by `entry_key` of their entry.
        unasked: Entries, by `entry_key`, that run anew though an older epoch has begun them.
    """

    now_ns: int
    replica: int = 0
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    halts: list[int] = field(default_factory=list)
    ended: list[EndedRequest] = field(default_factory=list)
    to_score: list[ScoreSample] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)
    retracted: dict[str, list[int]] = field(default_factory=dict)

    def add(self, key: str, output: Output) -> None:
        """Add an output of a request."""
        outputs = self.outputs.get(key)
        if outputs is None:
            self.outputs[key] = [output]
        else:
            outputs.append(output)

    def end(self, key: str, ended: EndedRequest) -> None:
        """Add a Completion."""
        self.add(key, ended.completion)
        self.ended.append(ended)


@dataclass(slots=True)
class Ending:
    """Fields that parts add to a Completion, its usage and its timings.

    Attributes:
        response: As in RequestFinished.
    """

    now_ns: int
    fields: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    response: StoredResponse | None = None

    def unstarted(self, request: RequestState | None, cancel: Cancel) -> EndedRequest:
        """Return the end of a request, perhaps unknown here, of which no sequence has run."""
        tenant = request.info.tenant if request is not None else ""
        completion = Completion(
            request_id=cancel.request_id,
            entry_id=cancel.entry_id,
            status=cancel.status,
            error=_error_of(cancel),
            usage=Usage(**self.usage),
            timings=Timings(finished_ns=self.now_ns, **self.timings),
        )
        return EndedRequest(None, completion, tenant=tenant)

    def of(self, request: RequestState, cancel: Cancel | None) -> EndedRequest:
        """Return the end of a request; `cancel` has ended it early."""
        info, samples = request.info, [each.result() for _, each in sorted(request.samples.items())]
        traced = _TRACEPARENT.match(info.traceparent)
        completion = Completion(
            request_id=info.request_id,
            entry_id=info.entry_id,
            model=info.model,
            status=cancel.status if cancel else "done",
            error=_error_of(cancel) if cancel else None,
            samples=tuple(samples),
            usage=Usage(
                prompt_tokens=len(info.prompt_token_ids),
                cached_tokens=request.cached_tokens,
                completion_tokens=sum(len(sample.token_ids) for sample in samples),
                **self.usage,
            ),
            timings=self._timings(request),
            trace_id=traced[1] if traced else "",
            prompt_token_ids=info.prompt_token_ids,
            **request.prompt_fields,
            **self.fields,
        )
        times = request.restored, request.last_token_ns
        return EndedRequest(info, completion, *times, self.response, info.tenant)

    def _timings(self, request: RequestState) -> Timings:
        """Join the stages of samples that ran at different times: earliest start, latest end."""
        info, executed_ns = request.info, request.executed_ns
        stages = [StageTime(stage="admission", start_ns=info.received_ns, end_ns=info.admitted_ns)]
        if request.queued is not None:
            stages.append(request.queued)
        if executed_ns:
            stages += [
                StageTime(stage="batching", start_ns=stages[-1].end_ns, end_ns=executed_ns),
                StageTime(stage="executor", start_ns=executed_ns, end_ns=request.step_end_ns),
            ]
        if streamed_ns := request.first_step_end_ns:
            stages.append(StageTime(stage="streaming", start_ns=streamed_ns, end_ns=self.now_ns))
        return Timings(
            received_ns=info.received_ns,
            first_token_ns=request.first_token_ns,
            finished_ns=self.now_ns,
            stages=tuple(stages),
            **self.timings,
        )


def _error_of(cancel: Cancel) -> ErrorInfo:
    return ErrorInfo(code=cancel.code, message=cancel.message, retry_after_s=cancel.retry_after_s)
