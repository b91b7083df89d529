"""Images in Python: prompts and answers equal those of Transformers' processors and models."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nano_inference import ChatRenderer, EngineConfig, InferenceEngine, SamplingParams
from nano_inference.stages.admission.parts.images import Images as AdmissionImages
from nano_inference.stages.executor.parts.images import Images

from ..media.pictures import picture, saved
from .builders import finish, raises
from .vision_folder import save_vision_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WIDE, HIGH = picture(24, 16), picture(16, 40)


def engine_of(folder: Path) -> InferenceEngine:
    return InferenceEngine(EngineConfig(model_path=str(folder), dtype="float32", kernels="off"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceEngine]:
    folder = tmp_path_factory.mktemp("qwen2_vl")
    save_vision_model("qwen2_vl", folder)
    with engine_of(folder) as made:
        yield made


PROMPT = "Look: <|image_pad|>"


def test_each_form_of_an_image_is_the_same(engine: InferenceEngine, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(saved(WIDE))
    clear = WIDE.convert("RGBA")
    forms: list[Any] = [WIDE, str(file), file, saved(WIDE), io.BytesIO(saved(WIDE)).getbuffer()]
    samples = engine.generate([PROMPT] * 6, GREEDY, images=[*forms, [clear]])
    assert len({(each.prompt_tokens, each.completion_tokens) for each in samples}) == 1
    encoded = engine._executor.part(Images).of_sequences
    assert encoded is not None
    assert encoded.embeddings.num_encoded == 1


def test_images_are_kept_until_their_requests_have_ended(engine: InferenceEngine) -> None:
    engine.add_request(PROMPT, GREEDY, images=[HIGH])
    second = engine.add_request(PROMPT, GREEDY, 2, images=[HIGH])
    with raises("images_mismatch"):
        engine.add_request(PROMPT, GREEDY, images=[WIDE, HIGH])
    assert len(engine._images._images) == 1
    engine.step()
    engine.abort(second)
    assert len(engine._images._images) == 1
    (sample,) = finish(engine)
    assert len(sample.completion_tokens) == 6
    assert not engine._images._images
    assert not engine._images._given


def test_a_rollout_s_tokens_are_a_prompt_again(engine: InferenceEngine) -> None:
    """With all image tokens, as trainers and later turns give them."""
    (sample,) = engine.generate([PROMPT], GREEDY, images=[WIDE])
    ids = [*sample.prompt_tokens, *sample.completion_tokens[:3]]
    (rest,) = engine.generate([ids], GREEDY, images=[WIDE])
    assert rest.completion_tokens[:3] == sample.completion_tokens[3:]
    assert rest.prompt_tokens == tuple(ids)


def test_a_conversation_is_rendered_with_places_for_its_images(
    engine: InferenceEngine,
) -> None:
    folder = Path(engine.config.model_path)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    chat = ChatRenderer(str(folder))
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}]
    prompt = chat.render([{"role": "user", "content": parts}])
    (sample,) = engine.generate([prompt.token_ids], GREEDY, images=[WIDE])
    (same,) = engine.generate([PROMPT], GREEDY, images=[WIDE])
    assert sample.prompt_tokens == same.prompt_tokens
    text = chat.render([{"role": "user", "content": "Hello"}])
    assert (
        engine._admission.part(AdmissionImages).processor._tokenizer.decode(text.token_ids)
        == "Hello"
    )
    with raises("invalid_messages"):
        chat.render([{"role": "user", "content": [{"type": "audio"}]}])


@pytest.mark.parametrize(
    ("images", "code", "words"),
    [
        ("a.png", "invalid_image", "list"),
        ([WIDE, WIDE], "invalid_request", "1 prompts and 2 images"),
        ([3], "invalid_image", "of type int"),
        (["/no/such/file.png"], "invalid_image", "can't be read"),
        ([b"text"], "invalid_image", "PNG"),
        ([Image.new("L", (20_000, 1))], "image_too_large", "20000 x 1"),
        ([[WIDE, HIGH]], "images_mismatch", "1 placeholders"),
        (None, "images_mismatch", "1 image tokens .* no images"),
    ],
)
def test_bad_images_are_refused(
    engine: InferenceEngine, images: Any, code: str, words: str
) -> None:
    with raises(code, words):
        engine.generate([PROMPT], GREEDY, images=images)
    assert not engine.has_pending()
    assert not engine._images._given


def test_a_model_of_texts_refuses_images() -> None:
    with InferenceEngine() as engine, raises("images_not_supported", "takes no images"):
        engine.generate(["98 + 25 ="], GREEDY, images=[WIDE])
