"""`nano-inference replay` and `digest`: requests computed again; one hash of all results."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from ..bus.public import DEFAULT_TENANT, Completion, GenerateRequest
from ..bus.recipes import has_id
from ..config import (
    ConfigError,
    EngineConfig,
    NanoInferenceError,
    RequestError,
    shown,
)
from ..pipeline.digest import Digest, RunDigest, VersionDigests, completions_of
from ..pipeline.operations import is_wanted
from ..pipeline.replay import PRIORITY, Replay, unknown
from ..pipeline.rollouts import TrainingSample
from ..pipeline.scoring import Submitter
from .clients import ServerClient, run_operation, submitter_at
from .connection import ServerAddress, Target, target_of
from .operations import COMMANDS, Row
from .options import AsJson, Options, argument, option, takes_status_options
from .terminal import complain, print_json, print_table, read_input
from .weight_log import Log, Run, engine_config

_AT_A_TIME = 32

Results = Sequence[Completion | TrainingSample]

File = Annotated[
    Path | None,
    option("--file FILE", "Lines of `submit --json`, or an audit log with texts; - is input."),
]
At = Annotated[
    int | None, option("--at VERSION", "The version that the weights in place have in the record.")
]


@takes_status_options
def replay(
    options: Options,
    id: Annotated[
        str, argument("ID", "Of a request, entry, call or trace; with --file default: all.")
    ] = "",
    file: File = None,
    at: At = None,
    weights: Annotated[
        Path | None, option("--weights FOLDER", "Compute here, with these weights of then.")
    ] = None,
    log: Log = None,
    run: Run = "",
    tenant: Annotated[str, option("--tenant NAME", "The tenant it counts for.")] = DEFAULT_TENANT,
    as_json: AsJson = False,
) -> None:
    """Compute a request again, token by token, and compare tokens and logprobs to the bit.

        nano-inference replay my-request

        nano-inference submit "98 + 25 =" --json | nano-inference replay --file -

        nano-inference replay my-request --file results.jsonl --weights checkpoints/17 --at 17

        nano-inference replay my-request --log /data/weights

    It says whether all is equal; if not, where the results first part, and why as far as that can
    be known. The record is looked up at the server or the bus, or read from --file. It
    runs at low priority on the pipeline; or in this process with --weights, or with --log: under
    the version that made its first token, or --at.

    The exit status is 0 if all is equal, 1 if something differs, 2 if it could not be compared.
    """
    if not id and file is None:
        raise ConfigError("give the id of a request, or records with --file")
    target = target_of(options)
    if isinstance(target, ServerAddress) and (file, weights, at, log) == (None,) * 4:
        _show_answer(asyncio.run(_asked(ServerClient(target), id)), as_json=as_json)
        return
    like = GenerateRequest(tenant=tenant, priority=PRIORITY)
    differ = failed = 0
    if file is not None:
        records = _chosen(_read(file), id)
    else:
        records = run_operation(options, "recorded", {"id": id}, target=target)
    if log is not None:
        results = _replays_of_log(engine_config(options, log), records, at, run)
    elif weights is not None:
        engine = replace(options.config().engine, model_path=str(weights))
        results = _replays_here(engine, records, at)
    else:
        results = iter(asyncio.run(_replays(target, options.served, records, like, at)))
    for result in results:
        if isinstance(result, NanoInferenceError):
            failed += 1
            complain(result.message)
            continue
        differ += result.verdict == "different"
        if as_json:
            print_json(result)
        else:
            _show(result)
    if differ or failed:
        raise typer.Exit(1 if differ else 2)


def _replays_here(
    engine: EngineConfig, records: Sequence[Completion], at: int | None
) -> Iterator[Replay | NanoInferenceError]:
    """Yield the results by an engine in this process, or their errors."""
    # Imports torch.
    from ..pipeline.engine import InferenceEngine

    with InferenceEngine(engine) as own:
        for record in records:
            try:
                yield own.replay(record, at=at)
            except RequestError as error:
                yield error


async def _replays(
    target: Target,
    model: str | None,
    records: Sequence[Completion],
    like: GenerateRequest,
    at: int | None,
) -> list[Replay | NanoInferenceError]:
    """Return the results at a server or a pipeline, or their errors."""
    slots = asyncio.Semaphore(_AT_A_TIME)

    async def run_one(client: Submitter, record: Completion) -> Replay | NanoInferenceError:
        async with slots:
            try:
                return await client.replay(record, like=like, at=at)
            except RequestError as error:
                return error

    async with submitter_at(target, model) as client:
        return await asyncio.gather(*(run_one(client, record) for record in records))


def _replays_of_log(
    past: EngineConfig, records: Sequence[Completion], at: int | None, run: str
) -> Iterator[Replay | NanoInferenceError]:
    """Yield the results under past versions, which an engine here has one after the other."""
    # Imports torch.
    from ..pipeline.past import engine_at

    by_version: dict[int, list[Completion]] = {}
    for record in records:
        versions = record.samples[0].weight_versions if record.samples else ()
        version = at if at is not None else versions[0][0] if versions else 0
        by_version.setdefault(version, []).append(record)
    for version, found in by_version.items():
        with engine_at(past, version, run=run) as engine:
            for record in found:
                try:
                    yield engine.replay(record)
                except RequestError as error:
                    yield error


async def _asked(client: ServerClient, id: str) -> dict[str, Any]:
    async with client:
        return await client.replay(id)


def _chosen(found: Results, id: str) -> list[Completion]:
    """Return the completions with an id; all without one. Raises RequestError: unknown_request."""
    records = [each for each in completions_of(found) if not id or has_id(each, id)]
    if not records:
        raise unknown(id)
    return records


# --- output -----------------------------------------------------------------------------------


def _show(result: Replay) -> None:
    """Print a result: the verdict, and what explains it."""
    typer.echo(f"{result.request_id or '-'}: {result.summary}")
    if result.verdict == "equal":
        return
    for sample in result.samples:
        if not sample.equal:
            gap = sample.largest_difference
            typer.echo(
                f"  sample {sample.sample_index}: {sample.equal_tokens} of {sample.tokens} tokens "
                f"come before the first other one; {sample.equal_logprobs} of "
                f"{sample.compared_logprobs} logprobs are equal"
                + (f", the others within {gap:.3g}" if gap else "")
            )
        for span in sample.spans if len(sample.spans) > 1 else ():
            typer.echo(
                f"    tokens {span.start} to {span.stop - 1}, weight version "
                f"{span.weight_version}: {span.equal_logprobs} logprobs are equal"
                + ("" if span.comparable else "; not comparable, other weights are in place")
            )
    for reason in result.reasons:
        typer.echo(f"  {reason}")
    if result.differences:
        rows = [
            (each.name, _value(each.recorded), _value(each.present)) for each in result.differences
        ]
        print_table(("what differs", "recorded", "now"), rows, "")


def _value(value: object) -> str:
    return "-" if value is None else str(value)


def _show_answer(answer: dict[str, Any], *, as_json: bool) -> None:
    """Print the answer of a server."""
    for each in answer.get("requests", ()):
        result = msgspec.convert(each, Replay)
        if as_json:
            print_json(result)
        else:
            _show(result)
    if answer.get("verdict") != "equal":
        raise typer.Exit(1)


# --- records --------------------------------------------------------------------------------------


class _AuditLine(msgspec.Struct):
    """A line of the audit log; `recorded` are completions, as JSON."""

    event: str
    recorded: tuple[str, ...] = ()


def _read(file: Path) -> list[Completion | TrainingSample]:
    """Return the results in a file's lines.

    Raises:
        ConfigError: The file can't be read.
        RequestError: A line holds no result.
    """
    found: list[Completion | TrainingSample] = []
    for number, line in enumerate(read_input(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found += _results_in(msgspec.json.decode(line))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{file}, line {number}: {error}") from None
    return found


def _results_in(line: Any) -> Iterator[Completion | TrainingSample]:
    """Yield the results of a line: a completion, a rollout, or those of a line of the audit log."""
    kind = line if isinstance(line, dict) else {}
    if kind.get("type") == "chunk":
        return
    if "completion_tokens" in kind and "prompt_tokens" in kind and "event" not in kind:
        yield msgspec.convert(line, TrainingSample)
    elif "event" in kind:
        for each in msgspec.convert(line, _AuditLine).recorded:
            yield msgspec.json.decode(each, type=Completion)
    else:
        yield msgspec.convert(line, Completion)


# --- digest ---------------------------------------------------------------------------------------


@takes_status_options
def digest(
    options: Options,
    ids: Annotated[
        list[str] | None, argument("ID", "Only these requests; PREFIX* for all that begin so.")
    ] = None,
    file: File = None,
    last: Annotated[
        float | None,
        option("--last SECONDS", "Without --file: only results of these last seconds.", min=0),
    ] = None,
    by_version: Annotated[
        bool, option("--by-version", "One digest for each version of the weights.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print one SHA-256 over all results, in the order of their ids.

        nano-inference digest --file results.jsonl

        nano-inference digest 'eval-7-*'

    In deterministic mode every run of the same requests with the same ids has the same one,
    whatever the number of lanes and replicas, the order of arrival, caches, speculation, and
    failures. Results are those that the server or the bus has, or of --file: lines of
    `submit --json`, of `tail --json`, of rollouts (TrainingSample as JSON), or of an audit log
    with texts. A bus in memory, as that of `serve`, keeps the last 256 results.

    With --by-version there is one for each version of the weights, of the results whose oldest
    token it sampled: of each epoch of an asynchronous run.
    """
    result: Any
    if file is not None:
        found = VersionDigests() if by_version else Digest()
        for each in completions_of(_read(file)):
            if is_wanted(each, ids or ()):
                found.add(each)
        result = found.result()
    else:
        operation = "digests" if by_version else "digest"
        result = run_operation(options, operation, {"ids": ids, "last_s": last})
    if not (result if isinstance(result, dict) else result.results):
        wanted = f" of {', '.join(map(shown, ids))}" if ids else ""
        raise RequestError(
            f"there are no results{wanted}",
            code="unknown_request",
            remedy="give the ids of requests that are recorded",
        )
    if as_json:
        print_json(result)
    elif isinstance(result, dict):
        for version, each_digest in result.items():
            typer.echo(f"{version} {each_digest.digest} {_counts(each_digest)}")
    else:
        typer.echo(result.digest)
        complain(_counts(result))


def _counts(found: RunDigest) -> str:
    failed = f", {found.failed} of them not done" if found.failed else ""
    return f"{found.results} results{failed}; {found.samples} samples, {found.tokens} tokens"


COMMANDS += [Row(digest, "digest"), Row(digest, "digests")]
