"""The time until a stream continues after kill -9 of each stage, without standbys and with them.

    python benchmarks/takeover.py [--shape bundled|S] [--stages executor,streaming] [--turns 5]
        [--ways none,standby] [--json FILE]

One stream runs in a lane of five processes of `nano-inference up` over Redis. After its 20th token
a stage's process is killed; the longest wait between two tokens from then on is printed, with
medians over the turns, and the memory of the stage's processes (PSS, shared pages split among
those that have them). chaos.py measures the same under many streams. Linux only.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaos_rig import Deployment, RedisServer, running_deployment
from harness import (
    children,
    command_line,
    model_folder,
    options,
    print_table,
    pss_mb,
    record,
    refuse_unknown,
)
from workloads import SHAPES

from nano_inference import BusClient, GenerateRequest, SamplingParams
from nano_inference.bus.public import CompletionChunk
from nano_inference.config import STAGES, BusConfig

PREFIX = "nano-benchmark-takeover"
WAYS = ("none", "standby")
BUNDLED = "bundled"
TOKENS = {BUNDLED: 400}
FEW_TOKENS, BEFORE = 60, 20
LIMIT_S = 600.0


def processes(deployment: Deployment, stage: str) -> list[int]:
    """Return the stage's processes: the one that serves, and a standby."""
    found = sorted(children(deployment.process.pid))
    return [pid for pid in found if f"--stages {stage} " in f"{' '.join(command_line(pid))} "]


async def until_ready(deployment: Deployment, stage: str, count: int) -> None:
    """Wait until a stage has so many processes, and all have loaded: they use no processor time."""
    async with asyncio.timeout(LIMIT_S):
        before: list[float] = []
        while True:
            pids = processes(deployment, stage)
            used = [sum(os_times(pid)) for pid in pids]
            if len(pids) == count and used == before:
                return
            before = used
            await asyncio.sleep(2.0)


def os_times(pid: int) -> tuple[int, int]:
    """Return the processor time of a process, in tenths of seconds: user, system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tenth = os.sysconf("SC_CLK_TCK") // 10
    return int(fields[11]) // tenth, int(fields[12]) // tenth


async def turn(
    client: BusClient, deployment: Deployment, stage: str, number: int, tokens: int
) -> float:
    """Return the longest wait for a token after the kill, in seconds."""
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = tuple(range(20 + number, 84 + number))
    request = GenerateRequest(prompt_token_ids=prompt, sampling=sampling, stream=True)
    at: list[float] = []
    killed = 0
    async for output in client.submit(request):
        if not isinstance(output, CompletionChunk):
            if output.status != "done":
                raise RuntimeError(f"the request failed: {output.error}")
            break
        at += [time.perf_counter()] * len(output.token_ids)
        if len(at) >= BEFORE and not killed:
            killed = len(at)
            await deployment.kill(stage)
    return max(after - before for before, after in pairwise(at[killed - 1 :]))


async def measure(
    folder: Path, model: Path | None, stage: str, way: str, turns: int, tokens: int
) -> dict[str, Any]:
    server = RedisServer(folder / "redis", "none")
    await server.start()
    settings: dict[str, object] = {
        "bus.prefix": PREFIX,
        "engine.max_model_len": 1024,
        "pipeline.restart_window_s": 1.0,  # each death counts as the first
        "telemetry.log_level": "warning",
    }
    if model is not None:
        settings["engine.model_path"] = model
    if way == "standby":
        settings["pipeline.standby"] = f"[{stage}]"
    count = 2 if way == "standby" else 1
    try:
        async with (
            running_deployment(server.url, folder / "up.log", settings) as deployment,
            BusClient.connect(BusConfig(url=server.url, prefix=PREFIX)) as client,
        ):
            waits = []
            for number in range(turns):
                await until_ready(deployment, stage, count)
                waits.append(await turn(client, deployment, stage, number, tokens))
            await until_ready(deployment, stage, count)
            memory = [pss_mb(pid) for pid in processes(deployment, stage)]
    finally:
        server.kill()
    return {
        "median_s": statistics.median(waits),
        "most_s": max(waits),
        "waits_s": waits,
        "pss_mb": memory,
        "pss": ", ".join(f"{each:,.0f}" for each in memory),
    }


def main() -> None:
    parser = options(
        __doc__,
        shape=(BUNDLED, [BUNDLED, *SHAPES]),
        folder=Path("build/benchmarks"),
        stages=[*STAGES],
        ways=[*WAYS],
        turns=(5, "kills of each stage, each way"),
    )
    arguments = parser.parse_args()
    refuse_unknown(parser, arguments.stages, STAGES)
    refuse_unknown(parser, arguments.ways, WAYS)
    model = None
    if arguments.shape != BUNDLED:
        model = model_folder(arguments.folder, arguments.shape)
    tokens = TOKENS.get(arguments.shape, FEW_TOKENS)
    rows = {}
    load = os.getloadavg()
    for stage in arguments.stages:
        for way in arguments.ways:
            with tempfile.TemporaryDirectory() as folder:
                run = measure(Path(folder), model, stage, way, arguments.turns, tokens)
                rows[f"{stage}, {way}"] = asyncio.run(run)
    columns = {"median": "{median_s:.2f}", "most": "{most_s:.2f}", "PSS, MB": "{pss}"}
    print_table(columns, rows, "seconds to the next token")
    record(arguments, load_average=load, takeover=rows)


if __name__ == "__main__":
    main()
