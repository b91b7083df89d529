"""Forks and limits of version lag over HTTP: fields of requests, and what an answer says of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nano_inference.bus.public import (
    Completion,
    Fork,
    ForkOrigin,
    GenerateRequest,
    Output,
    VersionLag,
)

from ...fake import Client
from ...made import interleaved, whole

FORK = {"request_id": "cmpl-7", "at": 3, "sample_index": 1}
ORIGIN = ForkOrigin(request_id="cmpl-7", entry_id="1-0", at=3, sample_index=1, num_generated=3)


def forked(request: GenerateRequest) -> list[Output]:
    """The outputs of a fork, whose prompt only admission finds."""
    *chunks, end = interleaved(request) if request.stream else whole(request)
    assert isinstance(end, Completion)
    return [*chunks, msgspec.structs.replace(end, fork=ORIGIN, prompt_token_ids=(5, 6, 7))]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"return_token_ids": True}),
        ("/inference/v1/generate", {}),
        ("/v1/completions", {"stream": True}),
    ],
)
async def test_a_fork_reaches_the_engine_and_its_origin_the_client(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    http.engine.outputs = forked
    answer = await http.post(path, json=body | {"fork": FORK})
    (request,) = http.engine.requests
    assert request.fork == Fork(request_id="cmpl-7", at=3, sample_index=1)
    assert (request.prompt, request.prompt_token_ids, request.images) == (None, None, ())
    assert request.model == "tiny"
    if not body.get("stream"):
        assert answer.json()["fork"] == msgspec.to_builtins(ORIGIN)
    if "return_token_ids" in body:
        assert answer.json()["choices"][0]["prompt_token_ids"] == [5, 6, 7]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "1"}, "prompt"),
        ("/inference/v1/generate", {"token_ids": [5]}, "token_ids"),
        ("/v1/completions", {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/completions", {"stream": True, "echo": True}, "echo"),
        ("/v1/completions", {"stream": True, "return_token_ids": True}, "return_token_ids"),
    ],
)
async def test_what_needs_the_prompt_of_a_fork_is_refused(
    http: Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = (await http.post(path, json=body | {"fork": FORK})).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_fork", param)
    assert not http.engine.requests


def old(request: GenerateRequest) -> list[Output]:
    (end,) = whole(request)
    assert isinstance(end, Completion)
    lag = VersionLag(versions=2, outcome="cut")
    samples = tuple(msgspec.structs.replace(each, version_lag=lag) for each in end.samples)
    return [msgspec.structs.replace(end, samples=samples)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "98 +"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/inference/v1/generate", {"token_ids": [5]}),
    ],
)
async def test_a_limit_of_lag_reaches_the_engine_and_the_lag_the_client(
    http: Client, path: str, body: dict[str, Any]
) -> None:
    http.engine.outputs = old
    limit = {"max_version_lag": 1, "on_version_lag": "cut"}
    answer = (await http.post(path, json=body | limit)).json()
    (request,) = http.engine.requests
    assert (request.max_version_lag, request.on_version_lag) == (1, "cut")
    assert answer["choices"][0]["version_lag"] == {"versions": 2, "outcome": "cut"}
