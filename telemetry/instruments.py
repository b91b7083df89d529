"""Every metric: its name, unit, description and attributes.

Names with `gen_ai.` and `http.`, and the buckets of the first, are those of OpenTelemetry's
conventions, https://github.com/open-telemetry/semantic-conventions-genai (gen-ai-metrics.md) and
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
# From the copy of a few blocks in memory to the limit of a transfer.
TRANSFER_SECONDS: tuple[float, ...] = (0.00005, 0.0001, 0.0002, 0.0003, *SECONDS[:-6])
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
# The buckets of OpenTelemetry's conventions.
TOKENS = tuple(float(4**power) for power in range(14))
GEN_AI_SECONDS = tuple(2**power / 100 for power in range(14))
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
OUTPUT_TOKEN_SECONDS = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),)


def _seconds(name: str, description: str, *attributes: str) -> Instrument:
    return _histogram(name, "s", description, SECONDS, *attributes)


def _step_seconds(name: str, description: str, *attributes: str) -> Instrument:
    return _histogram(name, "s", description, STEP_SECONDS, *attributes)


# Attributes of the gen_ai metrics that have one value in each process.
_GEN_AI = (names.OPERATION, names.PROVIDER, names.REQUEST_MODEL)

REQUESTS = _counter(
    "nano.requests", "{request}", "Requests that ended.", names.STATUS, names.ERROR_TYPE
)
MODEL_ROUTES = _counter(
    "nano.model.routes", "{request}", "Requests routed to models.", names.REQUEST_MODEL
)
MOE_REQUESTS = _counter(
    "nano.moe.requests", "{request}", "Requests for MoE models.", names.REQUEST_MODEL
)
OPERATION_DURATION = _histogram(
    "gen_ai.client.operation.duration",
    "s",
    "A call's head, or a request's publication, to its whole answer.",
    GEN_AI_SECONDS,
    *_GEN_AI,
    names.ERROR_TYPE,
)
TIME_TO_FIRST_CHUNK = _histogram(
    "gen_ai.client.operation.time_to_first_chunk",
    "s",
    "The same to the first chunk of a stream.",
    GEN_AI_SECONDS,
    *_GEN_AI,
)
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "s",
    "Admission to last token.",
    GEN_AI_SECONDS,
    *_GEN_AI,
    names.ERROR_TYPE,
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "Admission to first token.",
    FIRST_TOKEN_SECONDS,
    *_GEN_AI,
    names.PRIORITY,
)
QUEUE_DURATION = _seconds(
    "nano.request.queue.duration", "Time from admission to a request's first step.", names.PRIORITY
)
PREFILL_DURATION = _seconds(
    "nano.request.prefill.duration", "Time from the first step to the first token.", names.PRIORITY
)
DECODE_DURATION = _seconds(
    "nano.request.decode.duration", "Time from the first to the last token.", names.PRIORITY
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time per token after the first.",
    OUTPUT_TOKEN_SECONDS,
    *_GEN_AI,
)
TOKEN_INTERVAL = _seconds("nano.token.interval", "Time between two tokens of a sample.")
TOKEN_USAGE = _histogram(
    "gen_ai.client.token.usage",
    "{token}",
    "Tokens of prompts and answers.",
    TOKENS,
    *_GEN_AI,
    names.TOKEN_TYPE,
)
WAITING = _gauge("nano.requests.waiting", "{request}", "Requests on the stream that no lane holds.")
PENDING = _gauge("nano.requests.pending", "{request}", "Requests that lanes hold.")
DEAD_LETTERS = _gauge("nano.requests.dead", "{request}", "Dead letters that are kept.")
CONSTRAINTS = _counter(
    "nano.constraints",
    "{request}",
    "Requests with constraints.",
    names.CONSTRAINT,
    names.ERROR_TYPE,
)
CONSTRAINT_COMPILE = _step_seconds(
    "nano.constraint.compile.duration", "Time to compile a constraint.", names.CONSTRAINT
)
FORKS = _counter("nano.forks", "{request}", "Requests that fork another one.", names.ERROR_TYPE)
IMAGES = _counter("nano.images", "{image}", "Images of requests.", names.ERROR_TYPE)
IMAGE_TIME = _counter(
    "nano.images.time", "s", "Time to decode, process and store images, waiting included."
)
STORED_IMAGES = _gauge("nano.images.stored", "{image}", "Processed images in the store.")
STORED_IMAGE_BYTES = _gauge("nano.images.stored_bytes", "By", "Their size.")
ENCODED_IMAGES = _counter("nano.images.encoded", "{image}", "Images that executors encoded.")
CACHED_IMAGE_TOKENS = _gauge(
    "nano.images.cached_tokens", "{token}", "Image tokens whose embeddings executors keep."
)
DEAD_LETTERED = _counter(
    "nano.requests.buried", "{request}", "Requests moved to the dead letters.", names.ERROR_TYPE
)
QUEUE_LENGTH = _gauge(
    "nano.queue.length",
    "{request}",
    "Requests of which no sample has started, on the stream and in lanes.",
)
IN_FLIGHT = _gauge("nano.requests.in_flight", "{request}", "Requests that this lane holds.")
REPLAYS = _counter("nano.requests.replayed", "{request}", "Requests replayed after a failure.")
EPOCHS = _counter("nano.epochs", "{epoch}", "Restarts of the lane.")
RECONNECTS = _counter("nano.bus.reconnects", "{reconnect}", "Reconnects to Redis.")
QUEUE_DEPTH = _gauge("nano.queue.depth", "{request}", "Requests that wait in fairness.")
QUEUE_WAIT = _seconds("nano.queue.wait", "Time of a request in fairness.")
RUNNING = _gauge("nano.sequences.running", "{sequence}", "Samples in the batch.")
SEQUENCES_WAITING = _gauge(
    "nano.sequences.waiting", "{sequence}", "Samples that wait for KV blocks or a step."
)
STEP_AGE = _gauge(
    "nano.step.age", "s", "Time since the last step ended, while there are samples to compute."
)
PAUSED = _gauge("nano.generation.paused", "1", "1 while generation is paused, else 0.")
BATCH_SIZE = _histogram("nano.batch.size", "{sequence}", "Samples in a step.", SEQUENCES)
SCHEDULE_TIME = _step_seconds("nano.step.schedule_time", "Time to plan a step.")
DEVICE_TIME = _step_seconds("nano.step.device_time", "Time of a step on the device.")
MASK_WAIT = _step_seconds(
    "nano.step.mask_wait", "Time that logits wait for the masks of constraints."
)
PREFILLED = _counter("nano.tokens.prefilled", "{token}", "Prompt tokens computed.")
DECODED = _counter("nano.tokens.decoded", "{token}", "Rows of steps that made one token each.")
CACHED = _counter("nano.tokens.cached", "{token}", "Prompt tokens found in the prefix cache.")
RECOMPUTED = _counter(
    "nano.tokens.recomputed", "{token}", "Tokens prefilled again after preemptions and failures."
)
WASTED = _counter(
    "nano.tokens.wasted", "{token}", "Tokens computed ahead for samples that had ended."
)
# Named as vLLM's `vllm:spec_decode_*`.
DRAFTS = _counter("nano.spec_decode.num_drafts", "{draft}", "Drafts verified.", names.DRAFT_SOURCE)
DRAFT_TOKENS = _counter(
    "nano.spec_decode.num_draft_tokens", "{token}", "Tokens of these drafts.", names.DRAFT_SOURCE
)
ACCEPTED_TOKENS = _counter(
    "nano.spec_decode.num_accepted_tokens", "{token}", "Draft tokens accepted.", names.DRAFT_SOURCE
)
ACCEPTED_TOKENS_PER_POS = _counter(
    "nano.spec_decode.num_accepted_tokens_per_pos",
    "{token}",
    "Draft tokens accepted, by position.",
    names.DRAFT_SOURCE,
    names.DRAFT_POSITION,
)
PREFIX_LOOKUPS = _counter(
    "nano.prefix.lookups", "{sequence}", "Prefix cache lookups of samples.", names.PREFIX_RESULT
)
PREFIX_HITS = _counter("nano.prefix.hits", "{sequence}", "Prefix cache lookups with a hit.")
KV_TOTAL = _gauge("nano.kv.blocks", "{block}", "KV blocks.")
KV_USED = _gauge("nano.kv.blocks.used", "{block}", "KV blocks of running samples.")
KV_CACHED = _gauge("nano.kv.blocks.cached", "{block}", "KV blocks in the prefix cache.")
KV_EVICTED = _counter("nano.kv.blocks.evicted", "{block}", "Cached KV blocks evicted.")
KV_TIER_BLOCKS = _gauge(
    "nano.kv.tier.blocks", "{block}", "KV blocks in host memory and on disk.", names.KV_TIER
)
KV_TIER_MOVES = _counter(
    "nano.kv.tier.moves",
    "{block}",
    "KV blocks moved between device, host memory and disk, or lost on the way to or from disk.",
    names.KV_MOVE,
)
KV_EVENTS = _counter(
    "nano.kv.events",
    "{block}",
    "KV blocks published as stored or removed, and those in batches that the bus dropped.",
    names.KV_EVENT,
)
KV_TIME_SAVED = _counter(
    "nano.kv.tier.time_saved", "s", "Estimated computing time of KV that was loaded instead."
)
KV_PINNED = _gauge(
    "nano.kv.session.blocks", "{block}", "KV blocks pinned between the turns of conversations."
)
KV_SESSION_RESULTS = _counter(
    "nano.kv.session.results",
    "{result}",
    "Results of requests and calls about sessions, and pins that gave way to requests.",
    names.KV_SESSION_OUTCOME,
)
STATE_SNAPSHOTS = _gauge(
    "nano.state.snapshots", "{snapshot}", "Snapshots of recurrent state in prefix caches."
)
STATE_SNAPSHOTS_TAKEN = _counter(
    "nano.state.snapshots.taken", "{snapshot}", "Snapshots that steps have made."
)
STATE_HITS = _counter("nano.state.hits", "{sequence}", "Sequences that started from a snapshot.")
STATE_RECOMPUTED = _counter(
    "nano.state.recomputed",
    "{token}",
    "Tokens whose KV was cached, and that were computed again for lack of a snapshot.",
)
KV_TRANSFER_DURATION = _histogram(
    "nano.kv.transfer.duration",
    "s",
    "Time to read KV blocks of another executor.",
    TRANSFER_SECONDS,
    names.KV_TRANSPORT,
)
KV_TRANSFER_BYTES = _counter(
    "nano.kv.transfer.bytes", "By", "KV read from other executors.", names.KV_TRANSPORT
)
KV_TRANSFER_FAILURES = _counter(
    "nano.kv.transfer.failures",
    "{block}",
    "KV blocks that another executor no longer offered, or that did not come whole.",
    names.KV_TRANSPORT,
)
RANK_MEMORY = _gauge(
    "nano.rank.memory",
    "By",
    "Memory of each rank of a model: its weights, its KV cache, and the most resident so far.",
    names.RANK,
    names.MEMORY_KIND,
)
EXPERT_TOKENS = _counter(
    "nano.expert.tokens",
    "{token}",
    "Tokens that each expert computed, over all layers.",
    names.EXPERT,
)
RESPONSE_LOOKUPS = _counter(
    "nano.response_cache.lookups",
    "{request}",
    "Lookups in the response cache.",
    names.RESPONSE_RESULT,
)
RESPONSE_BYTES = _gauge("nano.response_cache.bytes", "By", "Memory of cached responses.")
RESPONSES = _gauge("nano.response_cache.responses", "{response}", "Cached responses.")
PREEMPTIONS = _counter("nano.preemptions", "{sequence}", "Samples preempted.")
RESUMES = _counter("nano.resumes", "{sequence}", "Samples resumed.")
FAIRNESS_PREEMPTIONS = _counter(
    "nano.fairness.preemptions", "{sequence}", "Samples paused for a priority."
)
FAIRNESS_YIELDS = _counter("nano.fairness.yields", "{sequence}", "Timeslices that ended.")
FAIRNESS_RESUMES = _counter("nano.fairness.resumes", "{sequence}", "Samples resumed after either.")
FAIRNESS_HANDOVERS = _counter(
    "nano.fairness.handovers", "{sequence}", "Samples that went on in another replica."
)
FAIRNESS_TOKENS = _counter(
    "nano.fairness.tokens", "{token}", "Tokens generated, by priority.", names.PRIORITY
)
FAIRNESS_SERVICE = _counter(
    "nano.fairness.service",
    "{token}",
    "Weighted tokens served by this lane and by others, with the exchange between lanes.",
    names.SERVED_BY,
)
FAIRNESS_EXCHANGE_AGE = _gauge(
    "nano.fairness.exchange.age", "s", "Time since the last exchange between lanes."
)
REQUEST_TIME = _counter(
    "nano.request.time",
    "s",
    "Time of ended requests, from publication to terminal message, by cause.",
    names.TENANT,
    names.TIME_CAUSE,
)
STEP_BILLED = _counter(
    "nano.step.billed", "s", "Time of steps that ended requests owe.", names.TENANT
)
STEP_UNBILLED = _counter("nano.step.unbilled", "s", "Time of steps that no request owes.")
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
    "Layers of steps, by back end and attention.",
    names.BACKEND,
    names.LAYER_KIND,
)
WEIGHT_BEHIND = _gauge(
    "nano.weight.behind", "{version}", "Version that a restarted executor lacks; 0 if none."
)
WEIGHT_TOKENS = _gauge(
    "nano.weight.tokens", "{token}", "Tokens that the weights in place have sampled."
)
WEIGHT_STALENESS = _histogram(
    "nano.weight.staleness",
    "{version}",
    "Age of a sample's oldest token, in updates.",
    (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
)
WEIGHT_UPDATES = _counter("nano.weight.updates", "{update}", "Weight updates.", names.ERROR_TYPE)
WEIGHT_FETCH = _seconds("nano.weight.fetch.duration", "Time to fetch weights.")
WEIGHT_BYTES = _counter("nano.weight.fetch.bytes", "By", "Bytes of fetched weights and deltas.")
WEIGHT_ELEMENTS = _counter(
    "nano.weight.elements", "{element}", "Elements of fetched weights; of deltas, changed ones."
)
ADAPTERS = _gauge("nano.adapter.loaded", "{adapter}", "Adapters loaded.")
ADAPTER_CHANGES = _counter(
    "nano.adapter.changes", "{change}", "Changes of adapters.", names.ERROR_TYPE
)
ADAPTER_LOAD = _seconds("nano.adapter.load.duration", "Time to read and check an adapter.")
STAGE_READY = _gauge("nano.stage.ready", "1", "1 if the stage is ready, 0 if not.", names.STAGE)
STAGE_RESTARTS = _gauge(
    "nano.stage.restarts",
    "{restart}",
    "Restarts of the stage, or of its process by `up`, since the pipeline was started.",
    names.STAGE,
)
HTTP_DURATION = _seconds(
    "http.server.request.duration",
    "Time of the gateway's calls.",
    names.HTTP_METHOD,
    names.HTTP_ROUTE,
    names.HTTP_STATUS,
)
GATEWAY_IN_FLIGHT = _gauge("nano.gateway.in_flight", "{request}", "Calls of the gateway in flight.")
GATEWAY_WAITING = _gauge("nano.gateway.waiting", "{request}", "Prompts that wait in the gateway.")
GATEWAY_CONNECTIONS = _gauge("nano.gateway.connections", "{connection}", "Open connections.")
GATEWAY_REFUSED = _counter(
    "nano.gateway.refused", "{refusal}", "Refused calls and connections.", names.GATEWAY_REASON
)
TOOL_CALLS = _counter(
    "nano.gateway.tool_calls", "{call}", "Tool calls of models.", names.CALL_OUTCOME
)
REASONING_TOKENS = _counter("nano.gateway.reasoning_tokens", "{token}", "Reasoning tokens.")
MODEL_CALL_DURATION = _seconds(
    "nano.gateway.model.duration",
    "Time of calls to KServe models.",
    names.REQUEST_MODEL,
    names.ERROR_TYPE,
)
BATCHES = _gauge("nano.batches", "{batch}", "Unfinished batches of all gateways.")
BATCH_LINES = _counter(
    "nano.batch.lines", "{line}", "Lines of batches that this gateway ended.", names.BATCH_OUTCOME
)
BATCH_OPEN_LINES = _gauge(
    "nano.batch.lines.open",
    "{line}",
    "Lines without an answer, of the batches that this gateway runs, alone or with others.",
)
BATCH_OLDEST = _gauge(
    "nano.batch.oldest.age", "s", "Age of the oldest batch that this gateway runs; 0 without any."
)
AUDIT_LOST = _counter("nano.gateway.audit.lost", "{line}", "Audit log lines not written.")
REQUEST_LOG_FAILED = _counter(
    "nano.gateway.console.failed", "{error}", "Errors in the console's list of requests."
)
LOG_DROPPED = _counter("nano.log.dropped", "{line}", "Log lines not written.", names.LOG_REASON)

INSTRUMENTS: tuple[Instrument, ...] = tuple(
    value for value in dict(globals()).values() if isinstance(value, Instrument)
)
"""All of them, in the order above."""
