"""Images in questions of commands, on a bus and at a server."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from nano_inference.bus.codec import check_request
from nano_inference.bus.public import GenerateRequest, ImageInput, ImagePart, TextPart
from nano_inference.cli.images import for_bus, question
from nano_inference.cli.openai_calls import openai_call
from nano_inference.cli.requests import Template
from nano_inference.config import Config

from ..media.pictures import picture, saved
from .conftest import Run, assert_refused
from .test_chat import Recorded
from .test_chat import recorded as recorded

FILE = saved(picture())


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a.png"
    path.write_bytes(FILE)
    return str(path)


def test_a_question_has_its_images_on_the_bus_and_at_a_server() -> None:
    asked = question("What?", [FILE])
    request = check_request(Template().of_text("What?", images=[FILE]), 1 << 20)
    assert isinstance(request, GenerateRequest)
    assert request.images == (ImageInput(data=FILE),)
    assert request.messages is not None
    assert request.messages[0].content == (ImagePart(), TextPart(text="What?"))
    body, _ = openai_call({"messages": [asked]})
    image, text = body["messages"][0]["content"]
    uri = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
    assert image == {"type": "image_url", "image_url": {"url": uri}}
    assert text == {"type": "text", "text": "What?"}


def test_a_question_without_images_is_as_before() -> None:
    asked = question("What?", [])
    assert asked == {"role": "user", "content": "What?"}
    assert for_bus([asked]) == {"messages": [asked]}
    assert openai_call({"messages": [asked]})[0]["messages"] == [asked]


def test_an_image_goes_with_the_next_question(run: Run, recorded: Recorded, file: str) -> None:
    ran = run("chat", stdin=f"/image {file}\none\ntwo\n")
    assert ran.status == 0
    assert "goes with the next question" in ran.stderr
    first, second = (asked["messages"] for asked in recorded.requests)
    assert first == [question("one", [FILE])]
    assert second[0] == first[0], "the conversation has it still"
    assert second[-1] == question("two", [])


def test_a_bad_image_is_refused(run: Run, recorded: Recorded, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("no image")
    ran = run("chat", stdin=f"/image {text}\n/image {tmp_path}/none.png\nquestion\n")
    assert ran.status == 1
    assert "is no PNG, JPEG, WebP or GIF" in ran.stderr
    assert "can't read" in ran.stderr
    assert recorded.said == [["question"]]


def test_submit_sends_an_image(run: Run, on_served: Config, file: str) -> None:
    """The bundled model takes texts only, and says so."""
    ran = run("submit", "What is this?", "--image", file)
    assert ran.status == 1
    assert "takes no images" in ran.stderr
    assert "images_not_supported" in ran.stderr
    assert_refused(run("submit", "--file", file, "--image", file), "--image takes a text")
    assert_refused(run("submit", "a", "--image", "/none.png"), "can't read /none.png")
