"""Names of attributes and events, with their sources. Metrics are in `instruments`.

OpenTelemetry's semantic conventions: GenAI (gen_ai.*), messaging (messaging.*), error (error.*),
HTTP (http.*, url.*, client.*), by the package `opentelemetry-semantic-conventions` 0.66. Our own
names start with `nano.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of that package, https://opentelemetry.io/docs/specs/semconv/
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

# Resource: https://opentelemetry.io/docs/specs/semconv/resource/#service
SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
SERVICE_VERSION = "service.version"

# https://github.com/open-telemetry/semantic-conventions-genai: gen-ai-spans.md, gen-ai-metrics.md
REQUEST_MODEL = "gen_ai.request.model"
CHOICES = "gen_ai.request.choice.count"
SEED = "gen_ai.request.seed"
STREAM = "gen_ai.request.stream"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_K = "gen_ai.request.top_k"
TOP_P = "gen_ai.request.top_p"
FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
OUTPUT_TYPE = "gen_ai.output.type"
CONVERSATION_ID = "gen_ai.conversation.id"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
TOKEN_TYPE = "gen_ai.token.type"
FINISH_REASONS = "gen_ai.response.finish_reasons"

# https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/
MESSAGE_ID = "messaging.message.id"

# https://opentelemetry.io/docs/specs/semconv/registry/attributes/error/
ERROR_TYPE = "error.type"

# https://opentelemetry.io/docs/specs/semconv/http/http-spans/#http-server-span
# and .../http/http-metrics/#http-server
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
CLIENT_ADDRESS = "client.address"

# Ours.
STAGE = "nano.stage"
REPLICA = "nano.replica"
REQUEST_ID = "nano.request.id"
SAMPLES = "nano.request.samples"
TENANT = "nano.request.tenant"
PRIORITY = "nano.request.priority"
EPOCH = "nano.epoch"
FIRST_TOKEN = "nano.first_token"
STATUS = "nano.request.status"
SAMPLE_INDEX = "nano.request.sample_index"
CONSTRAINT = "nano.request.constraint"
FORK_OF = "nano.request.fork.of"
FORK_AT = "nano.request.fork.at"
IMAGES = "nano.request.images"
PREFIX_RESULT = "nano.prefix.result"
RESPONSE_RESULT = "nano.response_cache.result"
GATEWAY_REASON = "nano.gateway.reason"
LOG_REASON = "nano.log.reason"
# Ours, of batches of lines.
BATCH_ID = "nano.batch.id"
BATCH_LINE = "nano.batch.line"
BATCH_LINES = "nano.batch.lines"
BATCH_OUTCOME = "nano.batch.outcome"
CALL_OUTCOME = "nano.gateway.tool_call.outcome"

# `position` of vLLM's metrics of speculation, and the source of drafts.
DRAFT_POSITION = "nano.spec_decode.position"
DRAFT_SOURCE = "nano.spec_decode.source"

# Spans of paused sequences, and the dispatches that came before a request.
FAIRNESS_YIELD = "fairness.yield"
FAIRNESS_RESUME = "fairness.resume"
YIELD_REASON = "nano.fairness.yield_reason"
PASSED_BY_PRIORITIES = "nano.fairness.passed_by.other_priorities"
PASSED_BY_TENANTS = "nano.fairness.passed_by.other_tenants"
PASSED_BY_OWN = "nano.fairness.passed_by.own_tenant"

# Ours, of steps.
BATCH_SIZE = "nano.batch.size"
PREFILL_TOKENS = "nano.step.prefill_tokens"
DECODE_TOKENS = "nano.step.decode_tokens"
BLOCKS_FREE = "nano.kv.blocks.free"
KV_TIER = "nano.kv.tier"
KV_MOVE = "nano.kv.move"
KV_EVENT = "nano.kv.event"
# Spans of a sequence that waits for its blocks, and their attributes.
KV_FETCH = "batching.kv_fetch"
KV_BLOCKS_FETCHED = "nano.kv.blocks.fetched"
KV_BLOCKS_LOADED = "nano.kv.blocks.loaded"
KV_BLOCKS_STORED = "nano.kv.blocks.stored"
KV_BLOCKS_OFFERED = "nano.kv.blocks.offered"
RANK = "nano.rank"
EXPERT = "nano.expert"
RANKS = "nano.ranks"
MEMORY_KIND = "nano.memory.kind"
KV_TRANSPORT = "nano.kv.transport"
HANDOVER = "batching.handover"
HANDED_OVER_BY = "nano.handed_over_by"
SERVED_BY = "nano.served_by"
KV_SESSION_OUTCOME = "nano.kv.session.outcome"
BACKEND = "nano.attention.backend"
LAYER_KIND = "nano.layer.kind"
DEVICE_TIME_S = "nano.step.device_time_s"
STEP_ID = "nano.step.id"
DRAFT_TOKENS = "nano.spec_decode.draft_tokens"
ACCEPTED_TOKENS = "nano.spec_decode.accepted_tokens"
SLICE_TOKENS = "nano.slice.tokens"
KEPT_TOKENS = "nano.replay.kept_tokens"

TIME_CAUSE = "nano.time.cause"
TIME_BILLED = "nano.time.billed"
_TIME = "nano.time."


def time_attributes(time: Mapping[str, int] | None, billed_ns: int | None) -> dict[str, int]:
    """Return a request's time as attributes of its span, in nanoseconds: one for each cause."""
    if not time:
        return {}
    causes = {f"{_TIME}{cause}": passed_ns for cause, passed_ns in time.items()}
    return {**causes, TIME_BILLED: billed_ns or 0}


def time_of(attributes: Mapping[str, Any]) -> dict[str, int]:
    """Return a request's time by cause from the attributes of a span; {} if it has none."""
    own = (TIME_BILLED, TIME_CAUSE)
    return {
        name.removeprefix(_TIME): int(value)
        for name, value in attributes.items()
        if name.startswith(_TIME) and name not in own
    }


# Ours, of events.
CANCELLED = "nano.cancelled"
PREEMPTED = "nano.preempted"
REPLAYED = "nano.replayed"
RESUMED = "nano.resumed"
