"""Names, units, labels and buckets of SGLang's metrics, as its version 0.5 has them.

https://docs.sglang.io/references/production_metrics.html ; its Grafana dashboard is
https://github.com/sgl-project/sglang/tree/main/examples/monitoring/grafana
"""

from __future__ import annotations

from .. import instruments as own
from . import Alias, Engine

_FIRST_TOKEN = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0),
    *(100.0, 200.0, 400.0),
)
_REQUEST = (*_FIRST_TOKEN, 600.0, 1200.0, 1800.0, 2400.0)
_PER_TOKEN = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
_PROMPT = (own.CACHED, own.PREFILLED)


def _seconds(
    name: str, description: str, source: own.Instrument, buckets: tuple[float, ...]
) -> Alias:
    return Alias(f"sglang:{name}", "histogram", description, (source,), buckets)


SGLANG = Engine(
    "dp_rank",
    {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"},
    (
        Alias("sglang:num_running_reqs", "gauge", "Samples in the batch.", (own.RUNNING,)),
        Alias(
            "sglang:num_queue_reqs",
            "gauge",
            "Samples that wait for KV blocks or a step, and requests in fairness.",
            (own.SEQUENCES_WAITING, own.QUEUE_DEPTH),
            how="sum",
        ),
        Alias(
            "sglang:token_usage",
            "gauge",
            "KV blocks in use: 1 is all.",
            (own.KV_USED, own.KV_TOTAL),
            how="ratio",
        ),
        Alias(
            "sglang:gen_throughput",
            "gauge",
            "Tokens generated in a second, but for first tokens.",
            (own.DECODED,),
            how="rate",
        ),
        Alias(
            "sglang:cache_hit_rate",
            "gauge",
            "Share of the prompt tokens of the last second found in the prefix cache.",
            _PROMPT,
            how="share",
        ),
        Alias("sglang:num_retracted_requests", "counter", "Samples preempted.", (own.PREEMPTIONS,)),
        Alias("sglang:prompt_tokens", "counter", "Prompt tokens computed or found.", _PROMPT),
        Alias("sglang:generation_tokens", "counter", "Tokens generated.", (own.FAIRNESS_TOKENS,)),
        Alias("sglang:cached_tokens", "counter", "Prompt tokens found.", (own.CACHED,)),
        Alias("sglang:num_requests", "counter", "Requests that ended.", of="requests"),
        Alias(
            "sglang:num_aborted_requests",
            "counter",
            "Requests cancelled or expired.",
            of="aborted",
        ),
        _seconds(
            "time_to_first_token_seconds",
            "To the first token.",
            own.TIME_TO_FIRST_TOKEN,
            _FIRST_TOKEN,
        ),
        _seconds(
            "inter_token_latency_seconds", "Between two tokens.", own.TOKEN_INTERVAL, _PER_TOKEN
        ),
        _seconds(
            "e2e_request_latency_seconds",
            "Admission to last token.",
            own.REQUEST_DURATION,
            _REQUEST,
        ),
        _seconds("queue_time_seconds", "To the first step.", own.QUEUE_DURATION, _REQUEST),
    ),
)
