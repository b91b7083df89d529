"""A replica for the fairness core: each step gives every running sequence a token."""

from __future__ import annotations

from nano_inference.bus.messages import AdmittedRequest, Credit, ResumeSequences
from nano_inference.config import FairnessConfig
from nano_inference.stages.fairness import FairnessCore

from .requests import request


class StepReplica:
    """Batching and executor, as fairness sees them.

    Attributes:
        now_ns: The time; each step takes `step_ns`.
        service: Each tenant's service, at its price and weight, by the replica's own count.
        started: When each request first ran.
        starts: Requests in the order in which sequences of theirs got a place, each time.
        made: Tokens of each sequence.
        finished: Requests in the order in which they finished.
    """

    def __init__(
        self,
        config: FairnessConfig | None = None,
        *,
        places: int = 2,
        step_ns: int = 10_000_000,
        report_every: int = 1,
        kv_free: int = 10**9,
        lane: str = "0",
    ) -> None:
        self.core = FairnessCore(config or FairnessConfig(), lane=lane)
        self.places = places
        self.step_ns = step_ns
        self.now_ns = 0
        self.steps = 0
        self.service: dict[str, float] = {}
        self.started: dict[str, int] = {}
        self.made: dict[int, int] = {}
        self.starts: list[str] = []
        self.finished: list[str] = []
        self.preemptions: dict[int, int] = {}
        self.running: dict[int, AdmittedRequest] = {}
        self.paused: dict[int, AdmittedRequest] = {}
        self._lengths: dict[str, int] = {}
        self._requests: dict[str, AdmittedRequest] = {}
        self._report_every = report_every
        self.kv_free = kv_free
        self._steps: list[tuple[int, ...]] = []
        self._new: list[tuple[int, int]] = []
        self.core.absorb(Credit(places), 0)

    def submit(self, name: str, tokens: int = 4, **fields: object) -> None:
        admitted = request(name, **fields)  # type: ignore[arg-type]
        self._lengths[name] = tokens
        self._requests[name] = admitted
        self.core.push(admitted, self.now_ns)
        self.dispatch()

    def dispatch(self) -> None:
        while (dispatched := self.core.pop(self.now_ns)) is not None:
            message, admitted = dispatched.message, dispatched.request
            if isinstance(message, AdmittedRequest):
                self.started.setdefault(message.info.request_id, self.now_ns)
                for spec in message.sequences:
                    self._start(spec.seq_id, admitted, len(admitted.prompt.token_ids))
                    self._serve(
                        admitted, self.core.config.prefill_weight * len(message.prompt.token_ids)
                    )
            elif isinstance(message, ResumeSequences):
                for seq_id in message.seq_ids:
                    self._start(seq_id, self.paused.pop(seq_id), 1)
        assert len(self.running) + self.core.credits == self.places
        assert not (self.core.credits and self.core.num_queued), "a place is free and one waits"

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self._step()

    def run(self, limit: int = 100_000) -> None:
        while self.running or self.core.num_queued:
            self._step()
            limit -= 1
            assert limit, "the replica did not come to rest"

    def run_until(self, name: str, limit: int = 100_000) -> None:
        while name not in self.started:
            self._step()
            limit -= 1
            assert limit, f"{name} did not start"

    def _step(self) -> None:
        self.now_ns += self.step_ns
        self.steps += 1
        ended = []
        for seq_id, admitted in self.running.items():
            self.made[seq_id] = self.made.get(seq_id, 0) + 1
            self._serve(admitted, self.core.config.decode_weight)
            if self.made[seq_id] == self._lengths[admitted.info.request_id]:
                ended.append(seq_id)
        self._steps.append(tuple(self.running))
        for seq_id in ended:
            self.finished.append(self.running.pop(seq_id).info.request_id)
        if ended or self.steps % self._report_every == 0:
            self._report(ended=tuple(ended))
            self.dispatch()
        if asked := self.core.ask_to_pause(self.now_ns):
            for running in asked:
                seq_id = running.spec.seq_id
                self.paused[seq_id] = self.running.pop(seq_id)
                self.preemptions[seq_id] = self.preemptions.get(seq_id, 0) + running.preempted
            self._report(paused=tuple(running.spec.seq_id for running in asked))
            self.dispatch()

    def _start(self, seq_id: int, admitted: AdmittedRequest, num_tokens: int) -> None:
        self.running[seq_id] = admitted
        self.starts.append(admitted.info.request_id)
        self._new.append((seq_id, num_tokens))

    def _serve(self, admitted: AdmittedRequest, cost: float) -> None:
        weight = self.core.config.tenant_weights.get(admitted.tenant, 1.0)
        self.service[admitted.tenant] = self.service.get(admitted.tenant, 0.0) + cost / weight

    def _report(self, paused: tuple[int, ...] = (), ended: tuple[int, ...] = ()) -> None:
        report = Credit(
            len(paused) + len(ended),
            tuple(self._steps),
            tuple(self._new),
            paused,
            ended,
            self.step_ns,
            self.kv_free,
        )
        self._steps.clear()
        self._new.clear()
        self.core.absorb(report, self.now_ns)
