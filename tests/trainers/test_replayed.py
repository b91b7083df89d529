"""Each form of a trainer's body, from the runs, is taken; the page has the results of all."""

from __future__ import annotations

import json
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from nano_inference.bus.public import GenerateRequest, Output

from ..gateway.fake import Client, FakeEngine, app_of, completion, http_of
from .results import BODIES, RESULTS, fields_of, reduced
from .served import MODEL
from .trainers import HERE, TRAINERS

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.asyncio(loop_scope="module")
RECORDED: dict[str, list[Any]] = json.loads(BODIES.read_text())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[Client]:
    engine = FakeEngine(scored)
    async with http_of(app_of(engine, {"engine.model_id": MODEL}), engine) as made:
        yield made


def scored(request: GenerateRequest) -> list[Output]:
    """Return a completion with the logprobs of the prompt, where they are asked for."""
    sampling, ids = request.sampling, request.prompt_token_ids or (1,)
    more: dict[str, Any] = {}
    if sampling.prompt_logprobs is not None:
        more["prompt_logprobs"] = (None, *(-1.0 for _ in ids[1:]))
        more["prompt_top_logprobs"] = tuple(() for _ in ids)
    return [completion(request, **more)]


@pytest.mark.parametrize(("path", "headers", "body", "neutral"), RECORDED.values(), ids=RECORDED)
async def test_a_body_as_a_trainer_sends_it_is_taken(
    http: Client, path: str, headers: dict[str, str], body: Any, neutral: list[str]
) -> None:
    if body == "":
        answer = await http.post(path, headers=headers)
    else:
        answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    named = answer.headers.get("X-Ignored-Fields", "")
    assert sorted(filter(None, named.split(", "))) == neutral


async def test_the_page_has_the_results_of_all_trainers() -> None:
    """`python docs/write_trainers.py` writes the page."""
    results = json.loads(RESULTS.read_text())
    assert {name: each["version"] for name, each in results.items()} == {
        name: trainer.version for name, trainer in TRAINERS.items()
    }
    assert {each["program"] for each in results.values()} == {
        each.name for each in HERE.glob("*.py") if each.stem != "verl_plugin"
    }
    writer = runpy.run_path(str(DOCS / "write_trainers.py"))
    assert writer["page"]() == writer["PAGE"].read_text()


async def test_a_body_is_reduced_to_its_form() -> None:
    body = {"prompt": [[1] * 9] * 9, "text": "two words", "n": 2, "of": {"path": "/tmp/x"}}
    found = reduced(body)
    assert found == {"prompt": [[1] * 4] * 4, "text": "text", "n": 2, "of": {"path": "text"}}
    assert fields_of(found) == fields_of(body)
