"""One digest under faults: requests of every kind, undisturbed and then while processes are killed.

    python benchmarks/chaos_mixed.py [--requests 2000] [--kills 200] [--seed S] [--json FILE]
                                     [--concurrency C] [--duration SECONDS] [--server PATH]
                                     [--replays N]

The requests have JSON schemas, tool calls, regular expressions, several samples, an adapter (LoRA),
logprobs, prompt logprobs, embeddings, images, penalties, stop strings; with and without seeds and
streams. They run twice in deterministic mode, over a Redis server with an append-only file:
undisturbed, without speculation and with the paged cache; then with speculation and the radix
cache, under SIGKILL of each stage and of the server, and cut connections (chaos.py has them).

Both runs must have the same digest (docs/replay.md), every stream must be whole, and each finished
JSON must parse. Then some requests of the disturbed run are replayed, and must be equal to the bit.
The exit status is 1 otherwise. Linux only.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import chaos
import chaos_rig
import msgspec
import torch
from chaos_rig import Entry, Load, Proxy, RedisServer, running_deployment
from PIL import Image
from safetensors.torch import save_file

from nano_inference import BusClient, Completion
from nano_inference.config import BusConfig, NanoInferenceError
from nano_inference.pipeline.digest import Digest

MODEL = "tiny-vision"
LAYERS, HIDDEN, KEY_WIDTH = 4, 128, 64
ADAPTER = "poet"
SETTINGS: dict[str, object] = {
    **chaos.SETTINGS,
    "engine.model_path": MODEL,
    "engine.deterministic": True,
    "engine.max_model_len": 512,
}
UNDISTURBED = {"engine.cache_type": "paged", "engine.speculation": "off"}
DISTURBED = {"engine.cache_type": "radix", "engine.speculation": "auto"}

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = f'start: "<tool_call>" call "</tool_call>"\ncall: %json {json.dumps(PERSON)}'


# --- requests -----------------------------------------------------------------------------------


def picture(rng: random.Random) -> str:
    """Return a PNG with a few coloured squares, as base64."""
    image = Image.new("RGB", (48, 48), rng.choice(("white", "black", "grey")))
    for _ in range(3):
        place = rng.randrange(40), rng.randrange(40)
        image.paste(rng.choice(("red", "green", "blue")), (*place, place[0] + 8, place[1] + 8))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def with_schema(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"constraint": {"json_schema": PERSON}, "ignore_eos": False}


def with_tool(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"constraint": {"lark": CALL}, "ignore_eos": False}


def with_regex(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"constraint": {"regex": "([a-z]{2,9} [0-9]+, )+"}}
    request["sampling"]["ignore_eos"] = False


def with_adapter(request: dict[str, Any], rng: random.Random) -> None:
    request["model"] = ADAPTER


def with_logprobs(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"logprobs": rng.randint(1, 5), "prompt_logprobs": rng.randint(0, 2)}


def with_images(request: dict[str, Any], rng: random.Random) -> None:
    request["images"] = [{"data": picture(rng)}]
    request["prompt"] = f"<image>{request['prompt'][:60]}"


def as_embedding(request: dict[str, Any], rng: random.Random) -> None:
    request |= {"embed": {"dimensions": rng.choice((16, 128))}, "n": 1, "stream": False}
    del request["sampling"]


def with_penalties(request: dict[str, Any], rng: random.Random) -> None:
    request["sampling"] |= {"repetition_penalty": 1.1, "presence_penalty": 0.3, "min_tokens": 4}


def plain(request: dict[str, Any], rng: random.Random) -> None:
    pass


KINDS: Sequence[Callable[[dict[str, Any], random.Random], None]] = (
    plain,
    with_schema,
    with_tool,
    with_regex,
    with_adapter,
    with_logprobs,
    with_images,
    as_embedding,
    with_penalties,
)


def make_requests(count: int, seed: int, longest: int) -> list[dict[str, Any]]:
    """Return requests of each kind in turn, on those of chaos.py, of which some have no seed."""
    rng = random.Random(seed)
    requests = chaos_rig.make_requests(count, seed, longest)
    for index, request in enumerate(requests):
        request["prompt"] = request["prompt"][:300]
        sampling = request["sampling"]
        sampling.pop("constraint", None)
        if rng.random() < 0.5:
            sampling.pop("seed", None)
        KINDS[index % len(KINDS)](request, rng)
    return requests


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter with random matrices, in PEFT's format."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(LAYERS):
        for name, width in (("q_proj", HIDDEN), ("v_proj", KEY_WIDTH)):
            module = f"base_model.model.model.language_model.layers.{layer}.self_attn.{name}"
            first = torch.randn(4, HIDDEN, generator=generator) / 8
            tensors[f"{module}.lora_A.weight"] = first
            tensors[f"{module}.lora_B.weight"] = torch.randn(width, 4, generator=generator) / 8
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


# --- runs ---------------------------------------------------------------------------------------


def digest_of(streams: Sequence[Sequence[Entry]]) -> dict[str, Any]:
    """Return the digest of the streams' terminal messages, by the fields of a RunDigest."""
    found = Digest()
    for stream in streams:
        if stream and stream[-1].output["type"] == "completion":
            found.add(msgspec.convert(stream[-1].output, Completion))
    return msgspec.to_builtins(found.result())


def invalid_json(
    requests: Sequence[dict[str, Any]], streams: Sequence[Sequence[Entry]]
) -> list[str]:
    """Return the finished samples that should be JSON, or a call with it, and are not."""
    wrong = []
    for index, (request, stream) in enumerate(zip(requests, streams, strict=True)):
        kind = KINDS[index % len(KINDS)]
        if kind not in (with_schema, with_tool) or not stream:
            continue
        for sample in stream[-1].output["samples"]:
            text = sample["text"].removeprefix("<tool_call>").removesuffix("</tool_call>")
            try:
                valid = sample["finish_reason"] != "stop" or isinstance(json.loads(text), dict)
            except ValueError:
                valid = False
            # A stop string of the request may have cut it.
            if not valid and "stop" not in request["sampling"]:
                wrong.append(f"{index}: {text[:80]}")
    return wrong


async def replayed(config: BusConfig, streams: Sequence[Sequence[Entry]]) -> dict[str, Any]:
    """Replay the requests of streams; return how many are equal, and why others are not."""
    remarks: list[str] = []
    places = asyncio.Semaphore(32)

    async def one(client: BusClient, recorded: Completion) -> bool:
        async with places:
            try:
                result = await client.replay(recorded)
            except NanoInferenceError as error:
                remarks.append(f"{recorded.request_id}: {error.code}: {error.message}")
                return False
        if result.verdict != "equal":
            remarks.append(f"{recorded.request_id}: {result.summary}; {'; '.join(result.reasons)}")
        return result.verdict == "equal"

    ends = [msgspec.convert(stream[-1].output, Completion) for stream in streams]
    async with BusClient.connect(config) as client:
        equal = await asyncio.gather(*(one(client, end) for end in ends))
    return {"replayed": len(ends), "replayed_equal": sum(equal), "not_equal": remarks[:50]}


async def run(
    folder: Path,
    size: chaos_rig.Size,
    work: Sequence[dict[str, Any]],
    *,
    disturbed: bool,
    replays: int = 0,
) -> dict[str, Any]:
    """Run the requests on a server and a pipeline of their own."""
    name = "disturbed" if disturbed else "undisturbed"
    prefix = f"{chaos.PREFIX}-{name}"
    adapters = json.dumps({ADAPTER: str(folder / "adapter")})
    settings = {
        **SETTINGS,
        **(DISTURBED if disturbed else UNDISTURBED),
        "bus.prefix": prefix,
        "engine.adapters": adapters,
    }
    redis_server = RedisServer(folder / name, binary=size.server)
    proxy = Proxy(redis_server.port)
    async with AsyncExitStack() as stack:
        await redis_server.start()
        stack.callback(redis_server.kill)
        await proxy.start()
        stack.push_async_callback(proxy.aclose)
        deployment = await stack.enter_async_context(
            running_deployment(proxy.url, folder / f"{name}.log", settings)
        )
        load = Load(redis_server.url, prefix, "run", work, size.concurrency)
        if not disturbed:
            await chaos_rig.bounded(load, deployment, size.duration_s)
            return {"streams": load.streams, "digest": digest_of(load.streams)}
        rng = random.Random(size.seed)
        storm = chaos.Chaos(deployment, redis_server, proxy, load, rng)
        faults = chaos_rig.spread_faults(
            load, chaos.TARGETS, size.kills, rng, storm.hit, storm.calm
        )
        ended = await chaos_rig.disturbed(load, deployment, size.duration_s, faults)
        some = rng.sample(load.streams, min(replays, len(work)))
        done = [each for each in some if each and each[-1].output["type"] == "completion"]
        return {
            **await replayed(BusConfig(url=proxy.url, prefix=prefix), done),
            "streams": load.streams,
            "digest": digest_of(load.streams),
            "kills": dict(Counter(fault.target for fault in storm.faults)),
            "recovery_s": chaos.recovery(storm.faults),
            **ended,
        }


async def compare(folder: Path, replays: int = 0, **given: Any) -> dict[str, Any]:
    """Do both runs of a `Size`; return the result file's content."""
    size = chaos_rig.Size(**given)
    work = make_requests(size.requests, size.seed, size.longest)
    await asyncio.to_thread(write_adapter, folder / "adapter")
    calm = await run(folder, size, work, disturbed=False)
    storm = await run(folder, size, work, disturbed=True, replays=replays)
    calm_streams, streams = calm.pop("streams"), storm.pop("streams")
    found = chaos.compare(work_of_streams(work), streams, calm_streams)
    invalid, not_equal = invalid_json(work, streams), storm.pop("not_equal")
    same = calm["digest"] == storm["digest"] and storm["digest"]["results"] == len(work)
    return {
        **size.fields(),
        "digest": storm.pop("digest"),
        "undisturbed_digest": calm["digest"],
        "one_digest": same,
        "invalid_json": len(invalid),
        **found,
        **storm,
        "clean": found["clean"] and same and not (invalid or not_equal),
        "remarks": [*found["remarks"], *invalid, *not_equal][:50],
    }


def work_of_streams(work: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests, in which those for vectors have sampling parameters to look at."""
    return [{"sampling": {"temperature": 0}, **request} for request in work]


async def run_program(folder: Path, given: Any) -> dict[str, Any]:
    size = chaos_rig.size_of(given, given.kills)
    return await compare(folder, replays=given.replays, **size)


def show(result: dict[str, Any]) -> None:
    chaos.print_result(result, chaos.FAULTS)
    print(f"digest        {result['digest']['digest']}")
    print(f"undisturbed   {result['undisturbed_digest']['digest']}")
    print(f"one digest: {result['one_digest']}; invalid JSON: {result['invalid_json']}")
    print(f"replayed: {result['replayed']}, equal to the bit: {result['replayed_equal']}")


def main() -> int:
    return chaos_rig.run_program(
        __doc__,
        run_program,
        show,
        requests=2000,
        kills=200,
        seed=1,
        concurrency=32,
        duration=(3600.0, "limit of each run, seconds"),
        longest=(60, "most tokens of a sample"),
        replays=(1000, "requests that are replayed at the end"),
        server=chaos_rig.SERVER,
    )


if __name__ == "__main__":
    sys.exit(main())
