"""Every metric: its name, its unit, and the question that it answers.

Names with `gen_ai.` and `http.` are those of OpenTelemetry's conventions,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ and
https://opentelemetry.io/docs/specs/semconv/http/http-metrics/ ; what these have no name for is
ours and starts with `nano.`. Units are UCUM's, https://ucum.org ; what stands in braces is a note.
Prometheus shows them with underscores, `_seconds` behind times and `_total` behind counters.
"""

from __future__ import annotations

from . import names
from .instrument import SECONDS, SEQUENCES, STEP_SECONDS, TOKENS, Instrument

# Attributes of the gen_ai metrics that are the same for all that a process serves.
_GEN_AI = (names.OPERATION, names.PROVIDER, names.REQUEST_MODEL)

REQUESTS = Instrument(
    "nano.requests",
    "counter",
    "{request}",
    "How many requests ended, how, and for what reason?",
    (names.STATUS, names.ERROR_TYPE),
)
MODEL_ROUTES = Instrument(
    "nano.model.routes",
    "counter",
    "{request}",
    "How many requests were sent on their way to each model?",
    (names.REQUEST_MODEL,),
)
MOE_REQUESTS = Instrument(
    "nano.moe.requests",
    "counter",
    "{request}",
    "How many requests were let in for a model with experts?",
    (names.REQUEST_MODEL,),
)
REQUEST_DURATION = Instrument(
    "gen_ai.server.request.duration",
    "histogram",
    "s",
    "How long from admission to the last token?",
    (*_GEN_AI, names.ERROR_TYPE),
    SECONDS,
)
TIME_TO_FIRST_TOKEN = Instrument(
    "gen_ai.server.time_to_first_token",
    "histogram",
    "s",
    "How long do people wait until something comes?",
    (*_GEN_AI, names.PRIORITY),
    SECONDS,
)
QUEUE_DURATION = Instrument(
    "nano.request.queue.duration",
    "histogram",
    "s",
    "How long from admission until the first of a request's samples is in a step?",
    (names.PRIORITY,),
    SECONDS,
)
PREFILL_DURATION = Instrument(
    "nano.request.prefill.duration",
    "histogram",
    "s",
    "How long from then until the step that made its first token is done?",
    (names.PRIORITY,),
    SECONDS,
)
DECODE_DURATION = Instrument(
    "nano.request.decode.duration",
    "histogram",
    "s",
    "How long from then until the step that made its last token is done?",
    (names.PRIORITY,),
    SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Instrument(
    "gen_ai.server.time_per_output_token",
    "histogram",
    "s",
    "How fast does a request's text flow, on average over its tokens but the first?",
    _GEN_AI,
    SECONDS,
)
TOKEN_INTERVAL = Instrument(
    "nano.token.interval",
    "histogram",
    "s",
    "Does the text stall? The time between two tokens of a sample: once for each step and each "
    "length that occurs in it.",
    (),
    SECONDS,
)
TOKEN_USAGE = Instrument(
    "gen_ai.client.token.usage",
    "histogram",
    "{token}",
    "How long are prompts, and how long answers?",
    (*_GEN_AI, names.TOKEN_TYPE),
    TOKENS,
)
WAITING = Instrument(
    "nano.requests.waiting",
    "gauge",
    "{request}",
    "How far does the pipeline lag behind its requests stream?",
)
PENDING = Instrument(
    "nano.requests.pending",
    "gauge",
    "{request}",
    "How many requests were taken from the stream, by any lane, and are not answered?",
)
DEAD_LETTERS = Instrument(
    "nano.requests.dead",
    "gauge",
    "{request}",
    "How many requests were given up and wait for somebody to look at them?",
)
CONSTRAINTS = Instrument(
    "nano.constraints",
    "counter",
    "{request}",
    "How many requests said what their text has to be, in which form, and how many were refused "
    "for it?",
    (names.CONSTRAINT, names.ERROR_TYPE),
)
CONSTRAINT_COMPILE = Instrument(
    "nano.constraint.compile.duration",
    "histogram",
    "s",
    "How long until it is known whether a text can become that? Nobody else waits for it.",
    (names.CONSTRAINT,),
    STEP_SECONDS,
)
BURIED = Instrument(
    "nano.requests.buried",
    "counter",
    "{request}",
    "How many requests became dead letters, and why?",
    (names.ERROR_TYPE,),
)
QUEUE_LENGTH = Instrument(
    "nano.queue.length",
    "gauge",
    "{request}",
    "How many requests wait, on the stream and in all lanes, until a sample of theirs begins?",
)
IN_FLIGHT = Instrument(
    "nano.requests.in_flight",
    "gauge",
    "{request}",
    "How many requests does this lane hold?",
)
REPLAYS = Instrument(
    "nano.requests.replayed",
    "counter",
    "{request}",
    "How many requests had to go on after a failure of a stage?",
)
EPOCHS = Instrument(
    "nano.epochs",
    "counter",
    "{epoch}",
    "How often did stages come, fail or leave, so that all began anew?",
)
RECONNECTS = Instrument(
    "nano.bus.reconnects",
    "counter",
    "{reconnect}",
    "How often was Redis away from this process, and came back?",
)
QUEUE_DEPTH = Instrument(
    "nano.queue.depth",
    "gauge",
    "{request}",
    "How many requests wait in fairness for their turn?",
)
QUEUE_WAIT = Instrument(
    "nano.queue.wait",
    "histogram",
    "s",
    "How long did they wait there until all their samples could run?",
    (),
    SECONDS,
)
RUNNING = Instrument(
    "nano.sequences.running",
    "gauge",
    "{sequence}",
    "How many samples are in the batch?",
)
SEQUENCES_WAITING = Instrument(
    "nano.sequences.waiting",
    "gauge",
    "{sequence}",
    "How many were dispatched and wait for KV blocks or a place in a step?",
)
BATCH_SIZE = Instrument(
    "nano.batch.size",
    "histogram",
    "{sequence}",
    "How full are the steps?",
    (),
    SEQUENCES,
)
SCHEDULE_TIME = Instrument(
    "nano.step.schedule_time",
    "histogram",
    "s",
    "What does it cost to plan a step?",
    (),
    STEP_SECONDS,
)
DEVICE_TIME = Instrument(
    "nano.step.device_time",
    "histogram",
    "s",
    "How long does a step take on the device?",
    (),
    STEP_SECONDS,
)
MASK_WAIT = Instrument(
    "nano.step.mask_wait",
    "histogram",
    "s",
    "How long do the logits of a step with constraints wait until it is known what may come?",
    (),
    STEP_SECONDS,
)
PREFILLED = Instrument(
    "nano.tokens.prefilled",
    "counter",
    "{token}",
    "How many tokens of prompts were computed?",
)
DECODED = Instrument(
    "nano.tokens.decoded",
    "counter",
    "{token}",
    "How many rows of steps made one token each?",
)
CACHED = Instrument(
    "nano.tokens.cached",
    "counter",
    "{token}",
    "How many tokens needed no computing, since the prefix cache had them?",
)
RECOMPUTED = Instrument(
    "nano.tokens.recomputed",
    "counter",
    "{token}",
    "How many of the prefilled had been computed before, until a preemption or a failure?",
)
WASTED = Instrument(
    "nano.tokens.wasted",
    "counter",
    "{token}",
    "How many were computed one step ahead for a sample that had ended?",
)
# Named as vLLM's `vllm:spec_decode_*`.
DRAFTS = Instrument(
    "nano.spec_decode.num_drafts",
    "counter",
    "{draft}",
    "How many drafts were verified, and where did they come from?",
    (names.DRAFT_SOURCE,),
)
DRAFT_TOKENS = Instrument(
    "nano.spec_decode.num_draft_tokens",
    "counter",
    "{token}",
    "How many tokens had they?",
    (names.DRAFT_SOURCE,),
)
ACCEPTED_TOKENS = Instrument(
    "nano.spec_decode.num_accepted_tokens",
    "counter",
    "{token}",
    "How many of these were what was sampled, and so needed no step of their own?",
    (names.DRAFT_SOURCE,),
)
ACCEPTED_TOKENS_PER_POS = Instrument(
    "nano.spec_decode.num_accepted_tokens_per_pos",
    "counter",
    "{token}",
    "The same by their place in the draft, from 0 on: how long may drafts be?",
    (names.DRAFT_SOURCE, names.DRAFT_POSITION),
)
PREFIX_LOOKUPS = Instrument(
    "nano.prefix.lookups",
    "counter",
    "{sequence}",
    "How many samples looked for their beginning in the prefix cache, and how much did they find?",
    (names.PREFIX_RESULT,),
)
PREFIX_HITS = Instrument(
    "nano.prefix.hits",
    "counter",
    "{sequence}",
    "How many of them found some of it? (`nano.tokens.cached` says how much.)",
)
KV_TOTAL = Instrument(
    "nano.kv.blocks",
    "gauge",
    "{block}",
    "How many KV blocks are there?",
)
KV_USED = Instrument(
    "nano.kv.blocks.used",
    "gauge",
    "{block}",
    "How many hold the tokens of samples that run?",
)
KV_CACHED = Instrument(
    "nano.kv.blocks.cached",
    "gauge",
    "{block}",
    "How many can be found by new samples, used or free?",
)
KV_EVICTED = Instrument(
    "nano.kv.blocks.evicted",
    "counter",
    "{block}",
    "How many cached blocks were given up to make room?",
)
PREEMPTIONS = Instrument(
    "nano.preemptions",
    "counter",
    "{sequence}",
    "How often had a sample to give up its blocks in mid-way?",
)
RESUMES = Instrument(
    "nano.resumes",
    "counter",
    "{sequence}",
    "How often did a sample go on after that, or after a failure?",
)
FAIRNESS_PREEMPTIONS = Instrument(
    "nano.fairness.preemptions",
    "counter",
    "{sequence}",
    "How often did a sample pause for one of higher priority?",
)
FAIRNESS_YIELDS = Instrument(
    "nano.fairness.yields",
    "counter",
    "{sequence}",
    "How often was a sample's time slice over, and another's turn?",
)
FAIRNESS_RESUMES = Instrument(
    "nano.fairness.resumes",
    "counter",
    "{sequence}",
    "How often did a sample go on after either?",
)
FAIRNESS_TOKENS = Instrument(
    "nano.fairness.tokens",
    "counter",
    "{token}",
    "Which priorities were the tokens generated for?",
    (names.PRIORITY,),
)
WEIGHT_VERSION = Instrument(
    "nano.weight.version",
    "gauge",
    "{version}",
    "Which weights make the tokens?",
)
ATTENTION_BACKEND = Instrument(
    "nano.attention.backend",
    "gauge",
    "{backend}",
    "Which back end computes attention? 1 for the one in use.",
    (names.BACKEND,),
)
ATTENTION_LAYERS = Instrument(
    "nano.attention.layers",
    "counter",
    "{layer}",
    "How many layers of steps did which back end compute, with full attention or a window?",
    (names.BACKEND, names.LAYER_KIND),
)
WEIGHT_BEHIND = Instrument(
    "nano.weight.behind",
    "gauge",
    "{version}",
    "Which version should an executor have that was started anew without it? 0 is none.",
)
WEIGHT_STALENESS = Instrument(
    "nano.weight.staleness",
    "histogram",
    "{version}",
    "How many updates old are the oldest tokens of a sample when it ends?",
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
)
WEIGHT_UPDATES = Instrument(
    "nano.weight.updates",
    "counter",
    "{update}",
    "How many weight updates were asked for, and how did they end?",
    (names.ERROR_TYPE,),
)
WEIGHT_FETCH = Instrument(
    "nano.weight.fetch.duration",
    "histogram",
    "s",
    "How long does it take until new weights are at hand?",
    buckets=SECONDS,
)
ADAPTERS = Instrument("nano.adapter.loaded", "gauge", "{adapter}", "How many adapters are loaded?")
ADAPTER_CHANGES = Instrument(
    "nano.adapter.changes",
    "counter",
    "{change}",
    "How many adapters were loaded, replaced or unloaded, and how did that end?",
    (names.ERROR_TYPE,),
)
ADAPTER_LOAD = Instrument(
    "nano.adapter.load.duration",
    "histogram",
    "s",
    "How long does it take until an adapter is read and checked?",
    buckets=SECONDS,
)
STAGE_READY = Instrument(
    "nano.stage.ready",
    "gauge",
    "1",
    "Does the stage take part (1) or not (0)?",
    (names.STAGE,),
)
HTTP_DURATION = Instrument(
    "http.server.request.duration",
    "histogram",
    "s",
    "How long do calls of the gateway take, and how do they end?",
    (names.HTTP_METHOD, names.HTTP_ROUTE, names.HTTP_STATUS),
    SECONDS,
)
GATEWAY_IN_FLIGHT = Instrument(
    "nano.gateway.in_flight", "gauge", "{request}", "How many calls of the gateway are under way?"
)
GATEWAY_WAITING = Instrument(
    "nano.gateway.waiting",
    "gauge",
    "{request}",
    "How many prompts wait in the gateway for a place in the pipeline?",
)
GATEWAY_CONNECTIONS = Instrument(
    "nano.gateway.connections", "gauge", "{connection}", "How many connections are open?"
)
GATEWAY_REFUSED = Instrument(
    "nano.gateway.refused",
    "counter",
    "{refusal}",
    "What did the gateway not serve, or not to the end, and by which of its limits and checks?",
    (names.GATEWAY_REASON,),
)
TOOL_CALLS = Instrument(
    "nano.gateway.tool_calls",
    "counter",
    "{call}",
    "How many calls of tools did models make, and how many could not be read?",
    (names.CALL_OUTCOME,),
)
REASONING_TOKENS = Instrument(
    "nano.gateway.reasoning_tokens",
    "counter",
    "{token}",
    "How many of the tokens generated are reasoning?",
)
MODEL_CALL_DURATION = Instrument(
    "nano.gateway.model.duration",
    "histogram",
    "s",
    "How long do calls of KServe's models take, and how do they end?",
    (names.REQUEST_MODEL, names.ERROR_TYPE),
    SECONDS,
)
AUDIT_LOST = Instrument(
    "nano.gateway.audit.lost",
    "counter",
    "{line}",
    "How many lines of the audit log could not be written?",
)
LOG_DROPPED = Instrument(
    "nano.log.dropped",
    "counter",
    "{line}",
    "How many lines of the log were not written, and why?",
    (names.LOG_REASON,),
)

INSTRUMENTS: tuple[Instrument, ...] = tuple(
    value for value in dict(globals()).values() if isinstance(value, Instrument)
)
"""All of them, in the order above."""
