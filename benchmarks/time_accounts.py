"""Cost of the accounts of time: the same load on one pipeline, with them and with nothing in turn.

python benchmarks/time_accounts.py [--rows 1,16,64] [--tokens 64] [--rounds 20] [--json FILE]

The bundled model's steps are the shortest, so this is the worst case. The pipeline is in memory, in
this process, where batching, executor and streaming run with their accounts, and with a patch that
makes none. Each pass is compared with its two neighbours without accounts, by the processor time of
all threads (harness.paired). Columns: the median of the ratios, and their quartiles.
"""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import torch
from cores import random_requests
from harness import options, paired, print_table, progress, record

from nano_inference.config import Config, EngineConfig, TelemetryConfig
from nano_inference.pipeline.pipeline import Pipeline
from nano_inference.stages.batching.parts.accounts import Accounts
from nano_inference.stages.executor.parts.times import Times
from nano_inference.stages.streaming.core import StreamingCore
from nano_inference.stages.streaming.parts import make_parts
from nano_inference.stages.streaming.parts.accounts import TimeAccounts
from nano_inference.telemetry import setup_logging

_WITH = Accounts.planned, Times.finish


def switch(core: StreamingCore, on: bool) -> None:
    """Let a pipeline without requests make accounts, or none."""
    parts = make_parts(Config(), 0)
    core.use([part for part in parts if on or not isinstance(part, TimeAccounts)])
    planned, computed = _WITH if on else (lambda *_: None, lambda *_: None)
    Accounts.planned, Times.finish = planned, computed  # type: ignore[assignment, method-assign]


def measure(rows: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return ratios of CPU times, with accounts to without."""
    engine = EngineConfig(max_batch_size=rows, cpu_threads=1)
    with asyncio.Runner() as runner:
        pipeline = Pipeline(Config(engine=engine))
        runner.run(pipeline.__aenter__())
        torch.set_num_threads(1)
        core = pipeline._actors["streaming"]._core
        requests = random_requests(rows, tokens, (8, 63), 1)
        # So that a pass is long enough for the clock.
        repeated = max(1, 512 // (tokens * (1 + rows // 8)))

        async def send() -> list[Any]:
            for _ in range(repeated):
                done = await asyncio.gather(*map(pipeline.complete, requests))
            return done

        def run(on: bool) -> None:
            switch(core, on)
            done = runner.run(send())
            assert all((each.usage.time is not None) == on for each in done)

        found = paired(lambda: run(True), lambda: run(False), rounds)
        runner.run(pipeline.__aexit__(None, None, None))
    ratios = [1 / share for share in found["cpu_share"]]
    first, median, third = statistics.quantiles(ratios, n=4)
    return {"median": median, "first": first, "third": third, "ratios": ratios}


def main() -> None:
    arguments = options(
        __doc__,
        rows=([1, 16, 64], "requests at once"),
        tokens=(64, "tokens for each of them"),
        rounds=(20, "of three passes each, after a warm-up"),
    ).parse_args()
    setup_logging(TelemetryConfig(log_level="error"))
    found = {}
    for number, rows in enumerate(arguments.rows, 1):
        found[str(rows)] = measure(rows, arguments.tokens, arguments.rounds)
        progress(number, len(arguments.rows), "number of rows")
    columns = {"CPU x none": "{median:.4f}", "quartiles": "{first:.4f}-{third:.4f}"}
    print_table(columns, found, "rows")
    record(arguments, rows_of=found)


if __name__ == "__main__":
    main()
