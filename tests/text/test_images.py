"""The tokens of images in a prompt are those of Transformers' own processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nano_inference.config import EngineConfig
from nano_inference.text.images import ImageProcessor

from ..errors import raises
from .processors import FAMILIES, save_model

SIZES = [(32, 32), (100, 40), (31, 90), (64, 64), (33, 7)]


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageProcessor]:
    found: dict[str, ImageProcessor] = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        save_model(family, folder)
        processor = ImageProcessor.of(folder)
        assert processor is not None
        found[name] = processor
    return found


def whole(processor: ImageProcessor, text: str, sizes: list[tuple[int, int]]) -> tuple[int, ...]:
    """Return the tokens that Transformers' processor makes of a text and its images."""
    images = [Image.new("RGB", size) for size in sizes]
    made: Any = processor._processor(text=[text], images=[images])
    return tuple(made["input_ids"][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_gets_the_tokens_of_transformers(
    processors: dict[str, ImageProcessor], name: str
) -> None:
    processor = processors[name]
    mark = processor.placeholder
    for sizes in [*([size] for size in SIZES), SIZES[:2], SIZES[1:]]:
        text = "user\n" + f"{mark}\nand ".join(["", *("" for _ in sizes)]) + "what is it?"
        ids = tuple(processor._tokenizer(processor.expand_text(text, sizes))["input_ids"])
        assert ids == whole(processor, text, sizes), sizes
        expanded = processor.expand(ids, sizes)
        assert expanded.token_ids == ids
        number = sum(image.number for image in expanded.images)
        assert number == ids.count(processor.placeholder_id) == sum(processor.num_tokens(sizes))
        for image in expanded.images:
            assert ids[image.start] == processor.placeholder_id
        ends = [image.start + image.number for image in expanded.images]
        assert all(
            end <= after.start for end, after in zip(ends, expanded.images[1:], strict=False)
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_token_ids_with_one_placeholder_for_each_image_are_expanded(
    processors: dict[str, ImageProcessor], name: str
) -> None:
    processor, sizes = processors[name], SIZES[:2]
    mark = processor.mark_id
    expanded = processor.expand((5, mark, 6, mark, 7), sizes)
    assert (expanded.token_ids[0], expanded.token_ids[-1]) == (5, 7)
    again = processor.expand(expanded.token_ids, sizes)
    assert again == expanded
    assert processor.expand((5, 6), ()).images == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_placeholders_that_do_not_fit_the_images_are_refused(
    processors: dict[str, ImageProcessor], name: str
) -> None:
    processor = processors[name]
    mark, one = processor.mark_id, SIZES[:1]
    for ids in ((5, 6), (5, mark, mark, mark, 6)):
        with raises("images_mismatch"):
            processor.expand(ids, SIZES[:2])
    expanded = processor.expand((5, mark, 6), one).token_ids
    place = expanded.index(processor.placeholder_id)
    for ids in (
        (*expanded, processor.placeholder_id),
        (processor.placeholder_id, *expanded),
        expanded[:place] + expanded[place + 1 :],
        expanded + expanded,
    ):
        if ids.count(processor.placeholder_id):
            with raises("images_mismatch"):
                processor.expand(ids, one)
    with raises("images_mismatch", "2 placeholders"):
        processor.expand_text(processor.placeholder * 2, one)


def test_smolvlm_treats_images_as_its_own_processor_does(
    processors: dict[str, ImageProcessor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' own processor needs a package for videos."""
    from transformers.models.smolvlm import processing_smolvlm

    processor = processors["smolvlm"]
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    kind = processing_smolvlm.SmolVLMProcessor
    checks = {"check_argument_for_proper_class": lambda self, name, part: type(part)}
    parts = (processor.image_processor, processor._tokenizer, None)
    own = type("Own", (kind,), checks)(*parts, image_seq_len=4)
    for size in SIZES:
        (expected,) = own._process_images([[Image.new("RGB", size)]], return_row_col_info=True)[1]
        assert processor.replacements([size]) == [expected]


def test_a_size_that_the_model_can_not_take_is_refused(
    processors: dict[str, ImageProcessor],
) -> None:
    with raises("invalid_image", "1000 x 1 pixels"):
        processors["qwen2_vl"].num_tokens([(1000, 1)])


@pytest.mark.parametrize(
    ("name", "sizes", "made"),
    [
        ("llava", [(1, 1024)], "32 x 32768"),
        ("llava", [(64, 64), (16_000, 9)], "56888 x 32"),
        ("llava_onevision", [(16_384, 2), (4, 4)], "16384 x 16384"),
    ],
)
def test_an_image_that_becomes_too_large_while_it_is_processed_is_refused(
    processors: dict[str, ImageProcessor], name: str, sizes: list[tuple[int, int]], made: str
) -> None:
    limits = {"max_pixels": 40_000_000, "max_side": 16_384}
    with raises("image_too_large", made):
        processors[name].check_growth(sizes, **limits)
    for each in processors.values():
        each.check_growth([(64, 64), (3000, 4000), (600, 20)], **limits)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_image_is_processed_to_count_its_tokens(
    processors: dict[str, ImageProcessor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processing the largest image would take a second."""
    kind = type(processors[name].image_processor)
    monkeypatch.setattr(kind, "preprocess", lambda *_, **__: pytest.fail("it is processed"))
    assert processors[name].num_tokens([(611, 517), (517, 611)])


def test_a_model_without_images_has_no_processor() -> None:
    assert ImageProcessor.of(EngineConfig().model_folder) is None


def test_a_processor_that_can_not_be_loaded_says_so(tmp_path: Path) -> None:
    from nano_inference.config import ModelError

    save_model(FAMILIES["llava"], tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with raises("model_unavailable", "processor.save_pretrained", ModelError):
        ImageProcessor.of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Lfm2VlImageProcessor"}'
    )
    with raises("model_unavailable", "without torchvision.*texts only", ModelError):
        ImageProcessor.of(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor"}'
    )
    (tmp_path / "processor_config.json").write_text('{"processor_class": "BertTokenizer"}')
    with raises("model_unavailable", "no processor", ModelError):
        ImageProcessor.of(tmp_path)
