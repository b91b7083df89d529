"""Every metric: its name, unit, description and attributes.

Names with `gen_ai.` and `http.` are those of OpenTelemetry's conventions,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ and
https://opentelemetry.io/docs/specs/semconv/http/http-metrics/ ; the others start with `nano.`.
Units are UCUM's, https://ucum.org ; text in braces is an annotation. Prometheus shows names with
underscores, `_seconds` after times and `_total` after counters.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from . import names


class Instrument(msgspec.Struct, frozen=True):
    """One metric.

    Attributes:
        name: By OpenTelemetry's rules.
        kind: A counter only grows, a gauge has a current value, a histogram counts values by size.
        unit: In UCUM.
        description: Shown by Prometheus as HELP.
        attributes: Its labels; see `names`.
        buckets: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, unit: str, description: str, *attributes: str) -> Instrument:
    return Instrument(name, "counter", unit, description, attributes)


def _gauge(name: str, unit: str, description: str, *attributes: str) -> Instrument:
    return Instrument(name, "gauge", unit, description, attributes)


def _histogram(
    name: str, unit: str, description: str, buckets: tuple[float, ...], *attributes: str
) -> Instrument:
    return Instrument(name, "histogram", unit, description, attributes, buckets)


# From half a millisecond, the length of a small model's step, to five minutes.
SECONDS: tuple[float, ...] = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300),
)
# Planning a step takes less than half a millisecond, and no step takes minutes.
STEP_SECONDS: tuple[float, ...] = (0.00005, 0.0001, 0.0002, 0.0003, *SECONDS[:-4])
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
# The buckets of OpenTelemetry's conventions.
TOKENS = tuple(float(4**power) for power in range(14))

# Attributes of the gen_ai metrics that have one value in each process.
_GEN_AI = (names.OPERATION, names.PROVIDER, names.REQUEST_MODEL)

REQUESTS = _counter(
    "nano.requests", "{request}", "Requests that ended.", names.STATUS, names.ERROR_TYPE
)
MODEL_ROUTES = _counter(
    "nano.model.routes", "{request}", "Requests routed to each model.", names.REQUEST_MODEL
)
MOE_REQUESTS = _counter(
    "nano.moe.requests", "{request}", "Requests admitted for a MoE model.", names.REQUEST_MODEL
)
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "s",
    "Time from admission to the last token.",
    SECONDS,
    *(*_GEN_AI, names.ERROR_TYPE),
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "Time from admission to the first token.",
    SECONDS,
    *(*_GEN_AI, names.PRIORITY),
)
QUEUE_DURATION = _histogram(
    "nano.request.queue.duration",
    "s",
    "Time from admission until a request's first sample is in a step.",
    SECONDS,
    names.PRIORITY,
)
PREFILL_DURATION = _histogram(
    "nano.request.prefill.duration",
    "s",
    "Time from a request's first step to the end of the step with its first token.",
    SECONDS,
    names.PRIORITY,
)
DECODE_DURATION = _histogram(
    "nano.request.decode.duration",
    "s",
    "Time from a request's first token to the end of the step with its last token.",
    SECONDS,
    names.PRIORITY,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time per token of a request after its first token.",
    SECONDS,
    *_GEN_AI,
)
TOKEN_INTERVAL = _histogram(
    "nano.token.interval",
    "s",
    "Time between two tokens of a sample: one value per step and distinct length in it.",
    SECONDS,
)
TOKEN_USAGE = _histogram(
    "gen_ai.client.token.usage",
    "{token}",
    "Tokens of prompts and of answers.",
    TOKENS,
    *(*_GEN_AI, names.TOKEN_TYPE),
)
WAITING = _gauge("nano.requests.waiting", "{request}", "Requests on the stream that no lane holds.")
PENDING = _gauge(
    "nano.requests.pending", "{request}", "Requests held by any lane and not yet answered."
)
DEAD_LETTERS = _gauge("nano.requests.dead", "{request}", "Dead letters that are kept.")
CONSTRAINTS = _counter(
    "nano.constraints",
    "{request}",
    "Requests with a constraint, accepted or refused.",
    *(names.CONSTRAINT, names.ERROR_TYPE),
)
CONSTRAINT_COMPILE = _histogram(
    "nano.constraint.compile.duration",
    "s",
    "Time to compile a constraint. Other requests are not delayed.",
    STEP_SECONDS,
    names.CONSTRAINT,
)
DEAD_LETTERED = _counter(
    "nano.requests.buried", "{request}", "Requests moved to the dead letters.", names.ERROR_TYPE
)
QUEUE_LENGTH = _gauge(
    "nano.queue.length",
    "{request}",
    "Requests on the stream and in all lanes of which no sample has started.",
)
IN_FLIGHT = _gauge("nano.requests.in_flight", "{request}", "Requests that this lane holds.")
REPLAYS = _counter(
    "nano.requests.replayed", "{request}", "Requests replayed after the failure of a stage."
)
EPOCHS = _counter(
    "nano.epochs", "{epoch}", "Epochs: restarts of the lane after a stage came, failed or left."
)
RECONNECTS = _counter(
    "nano.bus.reconnects", "{reconnect}", "Times that the connection to Redis was restored."
)
QUEUE_DEPTH = _gauge("nano.queue.depth", "{request}", "Requests that wait in fairness.")
QUEUE_WAIT = _histogram(
    "nano.queue.wait", "s", "Time in fairness until all samples of a request could run.", SECONDS
)
RUNNING = _gauge("nano.sequences.running", "{sequence}", "Samples in the batch.")
SEQUENCES_WAITING = _gauge(
    "nano.sequences.waiting",
    "{sequence}",
    "Dispatched samples that wait for KV blocks or a place in a step.",
)
BATCH_SIZE = _histogram("nano.batch.size", "{sequence}", "Samples in a step.", SEQUENCES)
SCHEDULE_TIME = _histogram("nano.step.schedule_time", "s", "Time to plan a step.", STEP_SECONDS)
DEVICE_TIME = _histogram(
    "nano.step.device_time", "s", "Time of a step on the device.", STEP_SECONDS
)
MASK_WAIT = _histogram(
    "nano.step.mask_wait",
    "s",
    "Time that the logits of a step wait for the masks of constraints.",
    STEP_SECONDS,
)
PREFILLED = _counter("nano.tokens.prefilled", "{token}", "Prompt tokens computed.")
DECODED = _counter("nano.tokens.decoded", "{token}", "Rows of steps that made one token each.")
CACHED = _counter("nano.tokens.cached", "{token}", "Prompt tokens found in the prefix cache.")
RECOMPUTED = _counter(
    "nano.tokens.recomputed",
    "{token}",
    "Prefilled tokens that were computed again after a preemption or a failure.",
)
WASTED = _counter(
    "nano.tokens.wasted", "{token}", "Tokens computed one step ahead for a sample that had ended."
)
# Named as vLLM's `vllm:spec_decode_*`.
DRAFTS = _counter("nano.spec_decode.num_drafts", "{draft}", "Drafts verified.", names.DRAFT_SOURCE)
DRAFT_TOKENS = _counter(
    "nano.spec_decode.num_draft_tokens", "{token}", "Tokens of these drafts.", names.DRAFT_SOURCE
)
ACCEPTED_TOKENS = _counter(
    "nano.spec_decode.num_accepted_tokens",
    "{token}",
    "Draft tokens accepted, which needed no step of their own.",
    names.DRAFT_SOURCE,
)
ACCEPTED_TOKENS_PER_POS = _counter(
    "nano.spec_decode.num_accepted_tokens_per_pos",
    "{token}",
    "Draft tokens accepted, by their position in the draft, from 0.",
    *(names.DRAFT_SOURCE, names.DRAFT_POSITION),
)
PREFIX_LOOKUPS = _counter(
    "nano.prefix.lookups",
    "{sequence}",
    "Prefix cache lookups, one per sample, by result.",
    names.PREFIX_RESULT,
)
PREFIX_HITS = _counter(
    "nano.prefix.hits",
    "{sequence}",
    "Prefix cache lookups that found a part of the prompt; `nano.tokens.cached` has its tokens.",
)
KV_TOTAL = _gauge("nano.kv.blocks", "{block}", "KV blocks.")
KV_USED = _gauge("nano.kv.blocks.used", "{block}", "KV blocks of running samples.")
KV_CACHED = _gauge("nano.kv.blocks.cached", "{block}", "KV blocks in the prefix cache.")
KV_EVICTED = _counter("nano.kv.blocks.evicted", "{block}", "Cached KV blocks evicted.")
PREEMPTIONS = _counter(
    "nano.preemptions", "{sequence}", "Samples preempted: their KV blocks were freed."
)
RESUMES = _counter("nano.resumes", "{sequence}", "Samples resumed after a preemption or a failure.")
FAIRNESS_PREEMPTIONS = _counter(
    "nano.fairness.preemptions", "{sequence}", "Samples paused for a higher priority."
)
FAIRNESS_YIELDS = _counter(
    "nano.fairness.yields", "{sequence}", "Samples paused at the end of their timeslice."
)
FAIRNESS_RESUMES = _counter(
    "nano.fairness.resumes", "{sequence}", "Samples resumed after either pause."
)
FAIRNESS_TOKENS = _counter(
    "nano.fairness.tokens", "{token}", "Tokens generated, by priority.", names.PRIORITY
)
WEIGHT_VERSION = _gauge("nano.weight.version", "{version}", "Version of the weights in place.")
ATTENTION_BACKEND = _gauge(
    "nano.attention.backend",
    "{backend}",
    "Attention back end: 1 for the one in use.",
    names.BACKEND,
)
ATTENTION_LAYERS = _counter(
    "nano.attention.layers",
    "{layer}",
    "Layers of steps by attention back end, with full attention or a window.",
    *(names.BACKEND, names.LAYER_KIND),
)
WEIGHT_BEHIND = _gauge(
    "nano.weight.behind",
    "{version}",
    "Version that a restarted executor lacks; 0 if none.",
)
WEIGHT_STALENESS = _histogram(
    "nano.weight.staleness",
    "{version}",
    "Weight updates since the oldest token of a sample, at its end.",
    (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
)
WEIGHT_UPDATES = _counter("nano.weight.updates", "{update}", "Weight updates.", names.ERROR_TYPE)
WEIGHT_FETCH = _histogram("nano.weight.fetch.duration", "s", "Time to fetch new weights.", SECONDS)
ADAPTERS = _gauge("nano.adapter.loaded", "{adapter}", "Adapters loaded.")
ADAPTER_CHANGES = _counter(
    "nano.adapter.changes",
    "{change}",
    "Adapters loaded, replaced or unloaded.",
    names.ERROR_TYPE,
)
ADAPTER_LOAD = _histogram(
    "nano.adapter.load.duration", "s", "Time to read and check an adapter.", SECONDS
)
STAGE_READY = _gauge("nano.stage.ready", "1", "1 if the stage is ready, 0 if not.", names.STAGE)
HTTP_DURATION = _histogram(
    "http.server.request.duration",
    "s",
    "Time of the gateway's calls.",
    SECONDS,
    *(names.HTTP_METHOD, names.HTTP_ROUTE, names.HTTP_STATUS),
)
GATEWAY_IN_FLIGHT = _gauge("nano.gateway.in_flight", "{request}", "Calls of the gateway in flight.")
GATEWAY_WAITING = _gauge(
    "nano.gateway.waiting",
    "{request}",
    "Prompts that wait in the gateway for a place in the pipeline.",
)
GATEWAY_CONNECTIONS = _gauge("nano.gateway.connections", "{connection}", "Open connections.")
GATEWAY_REFUSED = _counter(
    "nano.gateway.refused",
    "{refusal}",
    "Calls and connections that the gateway refused or cut off, by limit or check.",
    names.GATEWAY_REASON,
)
TOOL_CALLS = _counter(
    "nano.gateway.tool_calls",
    "{call}",
    "Tool calls of models, readable or malformed.",
    names.CALL_OUTCOME,
)
REASONING_TOKENS = _counter(
    "nano.gateway.reasoning_tokens", "{token}", "Generated tokens that are reasoning."
)
MODEL_CALL_DURATION = _histogram(
    "nano.gateway.model.duration",
    "s",
    "Time of calls to KServe models.",
    SECONDS,
    *(names.REQUEST_MODEL, names.ERROR_TYPE),
)
AUDIT_LOST = _counter(
    "nano.gateway.audit.lost", "{line}", "Audit log lines that could not be written."
)
LOG_DROPPED = _counter("nano.log.dropped", "{line}", "Log lines not written.", names.LOG_REASON)

INSTRUMENTS: tuple[Instrument, ...] = tuple(
    value for value in dict(globals()).values() if isinstance(value, Instrument)
)
"""All of them, in the order above."""
