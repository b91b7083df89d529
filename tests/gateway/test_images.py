"""Images through each interface of the gateway: the same prompt, and the same refusals."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import httpx2
import pytest
from openai import AsyncOpenAI

from nano_inference.bus.public import GenerateRequest, ImageInput
from nano_inference.config import Config, load_config
from nano_inference.gateway.policy.limits import TOKENS_OF_AN_IMAGE, prompt_tokens
from nano_inference.text.images import ImageProcessor

from ..errors import raises
from ..media.pictures import picture, saved
from ..media.test_fetch import Local, ok
from ..pipeline.kserve import a_call, infer_request, service_of
from ..text.processors import FAMILIES, save_model
from .fake import Client, FakeEngine, app_of, data_of, http_of

FILE = saved(picture(84, 56))
DATA_URI = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
TEXT = "What is this?"
RENDERED = f"[user]<|image_pad|>{TEXT}"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen2_vl")
    save_model(FAMILIES["qwen2_vl"], made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def config(folder: Path) -> Config:
    return load_config(
        env={},
        overrides={
            "engine.model_path": str(folder),
            "gateway.message_format": "off",
            "images.max_per_request": 2,
        },
    )


@pytest.fixture
async def connected(engine: FakeEngine, config: Config) -> AsyncIterator[dict[str, Any]]:
    transport = httpx2.ASGITransport(app_of(engine, config))
    async with httpx2.AsyncClient(transport=transport) as http_client:
        yield {"api_key": "none", "max_retries": 0, "http_client": http_client}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4}


def image_url(url: str = DATA_URI, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def asked(engine: FakeEngine) -> GenerateRequest:
    (request,) = engine.requests
    return request


# --- the interfaces -------------------------------------------------------------------------------

BLOCK = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/jpeg",  # which it isn't
        "data": base64.b64encode(FILE).decode(),
    },
}
ASKED = {"type": "text", "text": TEXT}
GENERATE = "/inference/v1/generate"
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat(image_url(detail="high"), ASKED)),
    "chat, a plain URL": (
        "/v1/chat/completions",
        chat({"type": "image_url", "image_url": DATA_URI}, ASKED),
    ),
    "responses": (
        "/v1/responses",
        {
            "store": False,
            "max_output_tokens": 4,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": DATA_URI, "detail": "auto"},
                        {"type": "input_text", "text": TEXT},
                    ],
                }
            ],
        },
    ),
    "messages": ("/v1/messages", chat(BLOCK, ASKED)),
}
SGLANG: dict[str, Any] = {
    "a data URI": DATA_URI,
    "a list": [DATA_URI],
    "base64": base64.b64encode(FILE).decode(),
    "an object": {"url": DATA_URI, "detail": "auto"},
}


@pytest.mark.parametrize("name", CALLS)
async def test_each_interface_submits_the_same_request(
    http: Client, engine: FakeEngine, name: str
) -> None:
    path, body = CALLS[name]
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    request = asked(engine)
    assert request.prompt == RENDERED
    assert request.prompt_token_ids is None
    assert not request.add_special_tokens, "the template has written its own"
    assert request.images == (ImageInput(data=FILE),)


@pytest.mark.parametrize("name", SGLANG)
async def test_sglangs_prompts_have_images(http: Client, engine: FakeEngine, name: str) -> None:
    body = {"text": RENDERED, "image_data": SGLANG[name]}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert (asked(engine).prompt, asked(engine).images) == (RENDERED, (ImageInput(data=FILE),))


async def test_each_prompt_of_a_batch_has_its_own_images(http: Client, engine: FakeEngine) -> None:
    body = {"input_ids": [[5], [6], [7]], "image_data": [SGLANG["base64"], None, SGLANG["a list"]]}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert [len(each.images) for each in engine.requests] == [1, 0, 1]


async def test_a_prompt_of_tokens_has_images_as_parts(
    http: Client, engine: FakeEngine, folder: Path
) -> None:
    """One placeholder stands for each; the answer shows the expanded prompt."""
    processor = ImageProcessor.of(folder)
    assert processor is not None
    given = [5, processor.mark_id, 6]
    parts = [{"type": "image_url", "url": DATA_URI}]
    body = {"token_ids": given, "content_parts": parts}
    assert (await http.post(GENERATE, json=body)).status_code == 200
    assert asked(engine).prompt_token_ids == (*given,)
    answer = (await http.post(GENERATE, json=body | {"return_token_ids": True})).json()
    ids, images = processor.expand(given, [(84, 56)])
    assert answer["prompt_token_ids"] == [*ids]
    (image,) = images
    assert answer["mm_placeholders"] == {"image": [{"offset": 1, "length": image.number}]}
    assert (engine.requests[-1].prompt_token_ids, engine.requests[-1].images) == (
        ids,
        (ImageInput(data=FILE),),
    )


async def test_features_of_a_rendered_chat_are_its_images(http: Client, engine: FakeEngine) -> None:
    """Trainers render the images alone, and move the ranges to those of their own prompt."""
    second = saved(picture(56, 84))
    uri = f"data:image/png;base64,{base64.b64encode(second).decode()}"
    body = chat(image_url(), image_url(uri), ASKED)
    answer = await http.post("/v1/chat/completions/render", json=body)
    assert answer.status_code == 200, answer.text
    rendered = answer.json()
    ranges = rendered["features"]["mm_placeholders"]["image"]
    marks = [rendered["token_ids"][each["offset"]] for each in ranges]
    assert len({*marks}) == 1
    assert rendered["token_ids"].count(marks[0]) == sum(each["length"] for each in ranges)
    assert (await http.post(GENERATE, json=rendered)).status_code == 200
    assert asked(engine).prompt_token_ids == (*rendered["token_ids"],)
    assert asked(engine).images == (ImageInput(data=FILE), ImageInput(data=second))
    # In another order of the prompt.
    runs = [{**each, "offset": place} for each, place in zip(ranges, (9, 0), strict=True)]
    features = rendered["features"] | {"mm_placeholders": {"image": runs}}
    await http.post(GENERATE, json={"token_ids": [5], "features": features})
    assert engine.requests[-1].images == (ImageInput(data=second), ImageInput(data=FILE))
    both = {"features": features, "content_parts": [{"type": "image_url", "url": DATA_URI}]}
    answer = await http.post(GENERATE, json={"token_ids": [5]} | both)
    assert answer.json()["error"]["param"] == "content_parts"


async def test_streams_do_too(http: Client, engine: FakeEngine) -> None:
    body = chat(image_url(), ASKED) | {"stream": True, "stream_options": {"include_usage": True}}
    assert data_of(await http.post("/v1/chat/completions", json=body))
    assert asked(engine).images == (ImageInput(data=FILE),)


async def test_a_stored_response_is_continued_with_its_images(
    http: Client, engine: FakeEngine
) -> None:
    path, body = CALLS["responses"]
    first = (await http.post(path, json=body | {"store": True})).json()
    items = (await http.get(f"{path}/{first['id']}/input_items")).json()["data"]
    assert items[0]["content"][0] == {
        "type": "input_image",
        "image_url": DATA_URI,
        "detail": "auto",
    }
    more = {"input": "And now?", "previous_response_id": first["id"]}
    answer = await http.post(path, json=body | more)
    assert answer.status_code == 200, answer.text
    request = engine.requests[-1]
    assert request.images == (ImageInput(data=FILE),)
    assert request.prompt is not None
    assert request.prompt.startswith(RENDERED)


async def test_results_of_tools_may_have_images(http: Client, engine: FakeEngine) -> None:
    messages = [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "see", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [BLOCK]}],
        },
    ]
    answer = await http.post("/v1/messages", json={"messages": messages, "max_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert asked(engine).images == (ImageInput(data=FILE),)


async def test_a_text_is_submitted_as_token_ids(http: Client, engine: FakeEngine) -> None:
    await http.post("/v1/chat/completions", json=chat(ASKED))
    assert asked(engine).prompt_token_ids
    assert asked(engine).images == ()


async def test_the_tokens_of_images_are_counted_and_shown(
    http: Client, engine: FakeEngine, folder: Path
) -> None:
    """The counts are admission's."""
    processor = ImageProcessor.of(folder)
    assert processor is not None
    text = processor.expand_text(RENDERED, [(84, 56)])
    ids = processor._tokenizer(text, add_special_tokens=False)["input_ids"]
    body = {"messages": chat(BLOCK, ASKED)["messages"]}
    answer = await http.post("/v1/messages/count_tokens", json=body)
    assert answer.json()["input_tokens"] == len(ids)
    path, body = CALLS["responses"]
    answer = await http.post(f"{path}/input_tokens", json=body)
    assert answer.json()["input_tokens"] == len(ids)
    answer = await http.post("/tokenize", json={"messages": chat(image_url(), ASKED)["messages"]})
    assert answer.json()["tokens"] == ids
    body = chat(image_url(), ASKED) | {"return_token_ids": True}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.json()["prompt_token_ids"] == ids
    assert asked(engine).prompt_token_ids == tuple(ids)


async def test_client_libraries_send_images(connected: dict[str, Any], engine: FakeEngine) -> None:
    from anthropic import AsyncAnthropic

    openai = AsyncOpenAI(base_url="http://127.0.0.1/v1", **connected)
    await openai.chat.completions.create(
        model="", messages=chat(image_url(), ASKED)["messages"], max_tokens=4
    )
    await openai.responses.create(model="", input=CALLS["responses"][1]["input"], store=False)
    anthropic = AsyncAnthropic(base_url="http://127.0.0.1", **connected)
    messages = chat(BLOCK, ASKED)["messages"]
    await anthropic.messages.create(model="", messages=messages, max_tokens=4)
    assert [each.images for each in engine.requests] == [(ImageInput(data=FILE),)] * 3


@pytest.mark.parametrize("data", [FILE, base64.b64encode(FILE), base64.encodebytes(FILE)])
async def test_kserve_takes_images_as_a_tensor(
    config: Config, engine: FakeEngine, data: bytes
) -> None:
    service = service_of(engine, config)  # type: ignore[arg-type]
    name = config.engine.model_name
    prompts: dict[str, dict[str, Any]] = {
        name: {"text_input": f"<|image_pad|>{TEXT}"},
        f"{name}.tokens": {"input_ids": [5, 6]},
    }
    for model, prompt in prompts.items():
        request = infer_request(model, image=data, **prompt)
        await service.infer_once(a_call(), request)
        assert engine.requests[-1].images == (ImageInput(data=FILE),)
    many = [base64.b64encode(FILE).decode()] * 3
    request = infer_request(name, image=many, text_input="a")
    with raises("too_many_images"):
        await service.infer_once(a_call(), request)


# --- refusals ----------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no base64": (image_url("data:image/png,abc"), "invalid_image_url", "base64"),
    "broken base64": (image_url("data:;base64,???"), "invalid_image", "base64"),
    "an empty file": (image_url("data:;base64,"), "invalid_image", "empty"),
    "a URL": (image_url("https://example.org/a.png"), "image_urls_off", "images.url_hosts"),
    "a path": (image_url("file:///etc/passwd"), "image_urls_off", "images.url_hosts"),
    "a stored file": ({"type": "input_image", "file_id": "f"}, "unsupported", "file_id"),
    "a video": ({"type": "video_url", "video_url": {"url": "x"}}, "unsupported", "video_url"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_images_are_refused_by_their_path(
    http: Client, engine: FakeEngine, name: str
) -> None:
    part, code, words = BAD[name]
    answer = await http.post("/v1/chat/completions", json=chat(ASKED, part))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code), error
    assert words in error["message"]
    assert "messages[0].content[1]" in (error["param"] or error["message"])
    assert engine.requests == []


_BASE64 = base64.b64encode(FILE).decode()
_LINES = base64.encodebytes(FILE).decode()


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{_LINES}",
        f"data:image/png;base64,{_LINES.replace(chr(10), chr(13) + chr(10))}",
        f" data:image/png ; BASE64,{_BASE64}\n",
        f"data:image/png;base64,{_BASE64.rstrip('=')}",
        f"data:image/png;base64,{quote(_BASE64, safe='')}",
        f"data:image/png;base64,{'%0A'.join(_LINES.split())}#here",
    ],
)
async def test_data_uris_are_read_as_browsers_do(
    http: Client, engine: FakeEngine, uri: str
) -> None:
    as_input = {"type": "input_image", "image_url": uri}
    for path, body in (
        ("/v1/chat/completions", chat(ASKED, image_url(uri))),
        ("/v1/responses", {"input": [{"role": "user", "content": [as_input]}], "store": False}),
    ):
        await http.post(path, json=body)
        assert engine.requests[-1].images == (ImageInput(data=FILE),), path


async def test_anthropics_base64_may_have_line_breaks(http: Client, engine: FakeEngine) -> None:
    block = BLOCK | {"source": BLOCK["source"] | {"data": _LINES}}
    await http.post("/v1/messages", json=chat(ASKED, block))
    assert engine.requests[-1].images == (ImageInput(data=FILE),)


async def test_too_many_images_are_refused(http: Client, engine: FakeEngine) -> None:
    answer = await http.post("/v1/chat/completions", json=chat(*[image_url()] * 3))
    assert answer.json()["error"]["code"] == "too_many_images"
    assert engine.requests == []


async def test_an_image_of_the_assistant_is_refused(http: Client, engine: FakeEngine) -> None:
    messages = [*chat(ASKED)["messages"], {"role": "assistant", "content": [image_url()]}]
    answer = await http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.json()["error"]["code"] == "unsupported"
    answer = await http.post("/v1/messages", json=chat(BLOCK) | {"system": [BLOCK]})
    assert answer.status_code == 400


async def test_sources_of_another_kind_are_refused(http: Client, engine: FakeEngine) -> None:
    block = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    answer = await http.post("/v1/messages", json=chat(block))
    assert "base64 or url" in answer.json()["error"]["message"]
    assert engine.requests == []


async def test_a_model_of_texts_refuses_images() -> None:
    engine = FakeEngine()
    async with http_of(app_of(engine, {"gateway.message_format": "off"}), engine) as http:
        parts = [{"type": "image_url", "url": DATA_URI}]
        tokens = {
            GENERATE: {"token_ids": [5], "content_parts": parts},
            "/generate": {"text": "a", "image_data": DATA_URI},
        }
        for path, body in (*CALLS.values(), *tokens.items()):
            answer = await http.post(path, json=body)
            assert answer.status_code == 400
            assert "takes no images" in answer.json()["error"]["message"]
    assert engine.requests == []


def test_images_count_in_the_estimate_for_limits() -> None:
    request = GenerateRequest(prompt="abc", images=(ImageInput(data=FILE),) * 2)
    assert prompt_tokens(request) == 1 + 2 * TOKENS_OF_AN_IMAGE
    request = GenerateRequest(prompt_token_ids=(5, 6), images=(ImageInput(data=FILE),))
    assert prompt_tokens(request) == 2 + TOKENS_OF_AN_IMAGE


# --- by URL ------------------------------------------------------------------------------------


async def test_an_image_is_fetched_by_url_where_that_is_allowed(
    config: Config, engine: FakeEngine
) -> None:
    server = Local(lambda path: ok(FILE) if path == "/a.png" else b"HTTP/1.1 404 No\r\n\r\n")
    async with server.serving() as port:
        allowed = load_config(
            env={},
            overrides={
                "engine.model_path": config.engine.model_path,
                "gateway.message_format": "off",
                "images.url_hosts": ["127.0.0.1", "127.0.0.2"],
                "images.url_networks": ["127.0.0.1/32"],
                "images.url_ports": [port],
            },
        )
        async with http_of(app_of(engine, allowed), engine) as http:
            url = f"http://127.0.0.1:{port}"
            block = {"type": "image", "source": {"type": "url", "url": f"{url}/a.png"}}
            answers: list[httpx.Response] = [
                await http.post("/v1/chat/completions", json=chat(image_url(f"{url}/a.png"))),
                await http.post("/v1/messages", json=chat(block)),
            ]
            assert [each.status_code for each in answers] == [200, 200]
            assert [each.images for each in engine.requests] == [(ImageInput(data=FILE),)] * 2
            answer = await http.post("/v1/chat/completions", json=chat(image_url(f"{url}/b.png")))
            assert answer.json()["error"]["code"] == "image_not_fetched"
            answer = await http.post(
                "/v1/chat/completions", json=chat(image_url(f"http://127.0.0.2:{port}/"))
            )
            assert answer.json()["error"]["code"] == "image_host_refused"
