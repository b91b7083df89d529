"""Names, units, labels and buckets of vLLM's metrics, as its version 0.11 has them.

https://docs.vllm.ai/en/latest/usage/metrics/ ; its Grafana dashboard is
https://github.com/vllm-project/vllm/tree/main/examples/observability/prometheus_grafana
"""

from __future__ import annotations

from .. import instruments as own
from .. import names
from . import Alias, Engine

_FIRST_TOKEN = (*own.FIRST_TOKEN_SECONDS, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_PER_TOKEN = (*own.OUTPUT_TOKEN_SECONDS, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# There up to the model's length.
_TOKENS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))

_INPUT, _OUTPUT = (names.TOKEN_TYPE, "input"), (names.TOKEN_TYPE, "output")
_QUERIED, _HIT = (own.PREFILLED, own.CACHED), (own.CACHED,)


def _seconds(
    name: str, description: str, source: own.Instrument, buckets: tuple[float, ...]
) -> Alias:
    return Alias(f"vllm:{name}", "histogram", description, (source,), buckets)


VLLM = Engine(
    "engine",
    {},
    (
        Alias("vllm:num_requests_running", "gauge", "Samples in the batch.", (own.RUNNING,)),
        Alias(
            "vllm:num_requests_waiting",
            "gauge",
            "Samples that wait for KV blocks or a step, and requests in fairness.",
            (own.SEQUENCES_WAITING, own.QUEUE_DEPTH),
            how="sum",
        ),
        *(
            Alias(
                name,
                "gauge",
                "KV blocks in use: 1 is all.",
                (own.KV_USED, own.KV_TOTAL),
                how="ratio",
            )
            for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        ),
        *(
            Alias(f"vllm:{prefix}prefix_cache_{name}", "counter", description, sources)
            for prefix in ("", "gpu_")
            for name, description, sources in (
                ("queries", "Prompt tokens looked up in the prefix cache.", _QUERIED),
                ("hits", "Prompt tokens found in the prefix cache.", _HIT),
            )
        ),
        Alias("vllm:num_preemptions", "counter", "Samples preempted.", (own.PREEMPTIONS,)),
        Alias("vllm:prompt_tokens", "counter", "Prompt tokens computed or found.", _QUERIED),
        Alias("vllm:generation_tokens", "counter", "Tokens generated.", (own.FAIRNESS_TOKENS,)),
        Alias(
            "vllm:request_success",
            "counter",
            "Samples of requests that ended.",
            of="finish_reasons",
        ),
        Alias(
            "vllm:request_prompt_tokens",
            "histogram",
            "Tokens of a prompt.",
            (own.TOKEN_USAGE,),
            _TOKENS,
            _INPUT,
        ),
        Alias(
            "vllm:request_generation_tokens",
            "histogram",
            "Tokens of an answer.",
            (own.TOKEN_USAGE,),
            _TOKENS,
            _OUTPUT,
        ),
        Alias(
            "vllm:request_max_num_generation_tokens",
            "histogram",
            "Tokens of a request's longest sample.",
            buckets=_TOKENS,
            of="longest",
        ),
        Alias(
            "vllm:request_params_n",
            "histogram",
            "Samples of a request.",
            buckets=(1.0, 2.0, 5.0, 10.0, 20.0),
            of="samples",
        ),
        _seconds(
            "time_to_first_token_seconds",
            "To the first token.",
            own.TIME_TO_FIRST_TOKEN,
            _FIRST_TOKEN,
        ),
        *(
            _seconds(name, "Between two tokens of a sample.", own.TOKEN_INTERVAL, _PER_TOKEN)
            for name in ("inter_token_latency_seconds", "time_per_output_token_seconds")
        ),
        _seconds(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            own.TIME_PER_OUTPUT_TOKEN,
            _PER_TOKEN,
        ),
        _seconds(
            "e2e_request_latency_seconds",
            "Admission to last token.",
            own.REQUEST_DURATION,
            _REQUEST,
        ),
        _seconds("request_queue_time_seconds", "To the first step.", own.QUEUE_DURATION, _REQUEST),
        _seconds(
            "request_prefill_time_seconds",
            "First step to first token.",
            own.PREFILL_DURATION,
            _REQUEST,
        ),
        _seconds(
            "request_decode_time_seconds", "First token to last.", own.DECODE_DURATION, _REQUEST
        ),
        Alias(
            "vllm:request_inference_time_seconds",
            "histogram",
            "First step to last token.",
            buckets=_REQUEST,
            of="running",
        ),
        *(
            Alias(f"vllm:spec_decode_{name}", "counter", source.description, (source,))
            for name, source in (
                ("num_drafts", own.DRAFTS),
                ("num_draft_tokens", own.DRAFT_TOKENS),
                ("num_accepted_tokens", own.ACCEPTED_TOKENS),
            )
        ),
        Alias(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "counter",
            own.ACCEPTED_TOKENS_PER_POS.description,
            (own.ACCEPTED_TOKENS_PER_POS,),
            label=("position", names.DRAFT_POSITION),
        ),
    ),
)
