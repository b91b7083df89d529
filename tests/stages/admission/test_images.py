"""Images of requests: checked, decoded, their tokens in the prompt, held in the store."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from nano_inference.bus.codec import check_request, decode_request, encode_request
from nano_inference.bus.control import EmbeddingCapacity, ImageCapacity, ReplicaCapacity
from nano_inference.bus.entries import Malformed, RequestEntry
from nano_inference.bus.media import MediaItem
from nano_inference.bus.messages import AdmittedRequest
from nano_inference.bus.parts.images import PromptMedia
from nano_inference.bus.public import (
    ChatMessage,
    EmbedParams,
    GenerateRequest,
    ImageInput,
    ImagePart,
    TextPart,
)
from nano_inference.bus.sections import with_sections
from nano_inference.config import (
    AdmissionConfig,
    Config,
    EngineConfig,
    ImagesConfig,
    SamplingParams,
)
from nano_inference.media import decode_process
from nano_inference.media.decoder import ImageDecoder
from nano_inference.media.turns import FairDecoder
from nano_inference.stages.admission.arrivals import Accepted, PromptImage, Tokens
from nano_inference.stages.admission.core import AdmissionCore
from nano_inference.stages.admission.held_images import HeldImages
from nano_inference.stages.admission.judging import without_files
from nano_inference.stages.admission.parts.images import Images
from nano_inference.store.images import MemoryImages
from nano_inference.text.images import ImageProcessor

from ...errors import raises
from ...media.pictures import picture, saved
from ...text.processors import FAMILIES, save_model

CAPACITY = ReplicaCapacity(
    num_blocks=64,
    block_size=16,
    max_model_len=500,
    vocab_size=900,
    device="cpu",
    parts=(ImageCapacity(max_tokens=100, cache_tokens=1000),),
)
SMALL, WIDE = picture(84, 56), picture(140, 56)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("qwen2_vl")
    tokenizer = save_model(FAMILIES["qwen2_vl"], folder)
    tokenizer.chat_template = TEMPLATE
    found = ImageProcessor.of(folder, tokenizer)
    assert found is not None
    return found


_DECODERS: dict[ImageProcessor, ImageDecoder] = {}
"""One for all cores: each of its processes imports Transformers."""


def core_of(
    processor: ImageProcessor | None,
    capacity: ReplicaCapacity = CAPACITY,
    admission: AdmissionConfig | None = None,
    **engine: Any,
) -> AdmissionCore:
    config = Config(
        engine=EngineConfig(**engine),
        images=ImagesConfig(max_per_request=3, max_bytes=100_000),
        admission=admission or AdmissionConfig(),
    )
    tokenizer = None if processor is None else processor._tokenizer
    core = AdmissionCore(config, tokenizer, frozenset({1}), processor)
    core.set_capacity(capacity)
    if processor is not None:
        images = core.part(Images)
        images.decoder = _DECODERS.setdefault(processor, images.decoder)
    return core


@pytest.fixture(scope="module")
def core(processor: ImageProcessor) -> AdmissionCore:
    return core_of(processor)


def file(image: Image.Image) -> ImageInput:
    return ImageInput(data=saved(image))


def id_of(image: Image.Image) -> str:
    return decode_process.id_of(*image.size, image.tobytes())


async def load(core: AdmissionCore, entry: RequestEntry, held: HeldImages | None = None) -> Tokens:
    """Do what the stage does before it admits an entry."""
    request, _ = core.check(entry, 0, 0)
    held = held or HeldImages(MemoryImages(), ImagesConfig(), durable=True)
    images: tuple[PromptImage, ...] = ()
    if request.images:
        decoder = FairDecoder(core.part(Images).decoder, ImagesConfig())
        images = await held.load(entry, core, decoder)
    return core.tokenize(request, images)


async def admit(core: AdmissionCore, **fields: Any) -> Accepted:
    fields = {"sampling": SamplingParams(max_tokens=4)} | fields
    entry = RequestEntry("7-0", GenerateRequest(**fields))
    return core.admit(entry, 0, 0, tokens=await load(core, entry))


def media_of(made: Tokens | AdmittedRequest) -> tuple[MediaItem, ...]:
    found = PromptMedia.find(made.parts)
    assert found is not None
    return found.items


# --- prompts -----------------------------------------------------------------------------------


async def test_each_form_of_a_prompt_gets_the_same_image_tokens(
    core: AdmissionCore, processor: ImageProcessor
) -> None:
    tokenizer, mark = processor._tokenizer, processor.placeholder
    images = (file(SMALL), file(WIDE))
    text = f"[user]{mark} and {mark}?"
    whole = processor._processor(text=[text], images=[SMALL, WIDE])["input_ids"][0]
    parts = (ImagePart(), TextPart(text=" and "), ImagePart(), TextPart(text="?"))
    plain = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    for form in (
        {"prompt": text},
        {"prompt": text, "add_special_tokens": False},
        {"prompt_token_ids": plain},
        {"prompt_token_ids": tuple(whole)},
        {"messages": (ChatMessage(role="user", content=parts),)},
    ):
        accepted = await admit(core, images=images, **form)
        assert accepted.admitted.prompt.token_ids == tuple(whole), form
        assert accepted.opened.prompt_token_ids == tuple(whole), "which are counted"
        first, second = media_of(accepted.admitted)
        assert (first.id, second.id) == (id_of(SMALL), id_of(WIDE))
        assert (second.width, second.height, second.alone) == (140, 56, False)
        places = [*first.places(whole), *second.places(whole)]
        assert places == [at for at, id in enumerate(whole) if id == processor.placeholder_id]


async def test_a_template_that_takes_texts_only_gets_placeholders(
    processor: ImageProcessor,
) -> None:
    core, tokenizer = core_of(processor), processor._tokenizer
    content = (TextPart(text="What is"), ImagePart())
    before, tokenizer.chat_template = (
        tokenizer.chat_template,
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    try:
        message = ChatMessage(role="user", content=content)
        ids = (
            await admit(core, images=(file(SMALL),), messages=(message,))
        ).admitted.prompt.token_ids
    finally:
        tokenizer.chat_template = before
    assert tokenizer.decode(ids).startswith("What is\n<|image_pad|><|image_pad|>")


async def test_a_conversation_without_images_reads_as_before(
    core: AdmissionCore, processor: ImageProcessor
) -> None:
    """Also by a template that takes parts alone."""
    message = ChatMessage(role="user", content="Hello")
    ids = (await admit(core, messages=(message,))).admitted.prompt.token_ids
    assert processor._tokenizer.decode(ids) == "[user]Hello"


async def test_an_image_is_named_by_id(core: AdmissionCore, processor: ImageProcessor) -> None:
    held = Held(core)
    await held.put(1, file(SMALL))
    tokens = await held.put(2, ImageInput(id=id_of(SMALL)), file(SMALL))
    first, second = media_of(tokens)
    assert (first.id, first.name, first.num_tokens) == (second.id, second.name, second.num_tokens)


async def test_prompts_of_other_images_are_other_prompts(
    core: AdmissionCore, processor: ImageProcessor
) -> None:
    """For the response cache, although their tokens are equal."""
    other = SMALL.copy()
    other.putpixel((0, 0), (9, 9, 9))
    prompts = [
        (await admit(core, prompt=processor.placeholder, images=(file(each),))).admitted.prompt
        for each in (SMALL, other)
    ]
    assert prompts[0].token_ids == prompts[1].token_ids
    assert prompts[0] != prompts[1]


# --- refusals ----------------------------------------------------------------------------------

MARK = "<|image_pad|>"
REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "too many": ({"images": (file(SMALL),) * 4}, "too_many_images", "4 images"),
    "no placeholder": (
        {"prompt": "x", "images": (file(SMALL),)},
        "images_mismatch",
        "0 placeholders",
    ),
    "too many placeholders": ({"prompt": MARK * 3}, "images_mismatch", "3 placeholders"),
    "a part without image": (
        {"prompt": None, "messages": (ChatMessage(role="user", content=(ImagePart(),) * 2),)},
        "images_mismatch",
        "2 parts",
    ),
    "neither data nor id": ({"images": (ImageInput(),)}, "invalid_image", "neither"),
    "both": ({"images": (ImageInput(data=b"x", id="0" * 64),)}, "invalid_image", "both"),
    "a cut id": ({"images": (ImageInput(id="0" * 63),)}, "invalid_image", "whole id"),
    "a strange id": ({"images": (ImageInput(id="X" * 64),)}, "invalid_image", "whole id"),
    "an unknown id": ({"images": (ImageInput(id="0" * 64),)}, "unknown_image", "send its file"),
    "no image": ({"images": (ImageInput(data=b"text"),)}, "invalid_image", r"images\[0\]"),
    "a large file": ({"images": (ImageInput(data=bytes(100_001)),)}, "image_too_large", None),
    "an odd shape": ({"images": (file(picture(900, 2)),)}, "invalid_image", "900 x 2"),
    "an embedding": ({"embed": EmbedParams()}, "invalid_embed", None),
    "ids that do not fit": (
        {"prompt": None, "prompt_token_ids": (5, 901)},
        "invalid_token_ids",
        None,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_images_are_refused(processor: ImageProcessor, name: str) -> None:
    fields, code, words = REFUSED[name]
    embedding = [EmbeddingCapacity(8, "mean", False)] if name == "an embedding" else []
    capacity = with_sections(CAPACITY, *embedding)
    sampling = {"sampling": SamplingParams()} if embedding else {}
    wanted = {"prompt": MARK, "images": (file(SMALL),)} | sampling | fields
    with raises(code, words):
        await admit(core_of(processor, capacity), **wanted)


@pytest.mark.parametrize(
    ("form", "embeds"),
    [("text", False), ("ids", False), ("conversation", False), ("text", True)],
)
async def test_image_tokens_without_images_are_refused(
    processor: ImageProcessor, form: str, embeds: bool
) -> None:
    """They were answered as text, without a word."""
    forms: dict[str, dict[str, Any]] = {
        "text": {"prompt": f"a{MARK}b{MARK}"},
        "ids": {"prompt_token_ids": (5, processor.mark_id, 6, processor.placeholder_id)},
        "conversation": {"messages": (ChatMessage(role="user", content=MARK * 2),)},
    }
    capacity = CAPACITY
    if embeds:
        forms[form] |= {"embed": EmbedParams(), "sampling": SamplingParams()}
        embedding = EmbeddingCapacity(8, "mean", False)
        capacity = with_sections(CAPACITY, embedding)
    with raises("images_mismatch", "2 image tokens .* no images; give the images"):
        await admit(core_of(processor, capacity), **forms[form])


async def test_tokens_that_only_look_like_images_are_text(processor: ImageProcessor) -> None:
    core = core_of(processor)
    for text in (MARK[:-1], MARK.upper(), "<image>"):
        assert (await admit(core, prompt=text)).admitted.parts == ()
    texts = AdmissionCore(Config(), processor._tokenizer, frozenset({1}))
    texts.set_capacity(msgspec.structs.replace(CAPACITY, parts=()))
    for given in ({"prompt": MARK}, {"prompt_token_ids": (5, processor.mark_id)}):
        assert (await admit(texts, **given)).admitted.parts == ()


async def test_an_image_with_too_many_tokens_is_refused(processor: ImageProcessor) -> None:
    capacity = with_sections(CAPACITY, ImageCapacity(3, 1000))
    with raises("image_too_large", "max_image_tokens_per_step"):
        await admit(core_of(processor, capacity), prompt=MARK, images=(file(SMALL),))
    capacity = msgspec.structs.replace(CAPACITY, max_model_len=4)
    with raises("prompt_too_long", "images take"):
        await admit(core_of(processor, capacity), prompt=MARK, images=(file(SMALL),))


async def test_a_model_of_texts_refuses_images_by_name(processor: ImageProcessor) -> None:
    texts = msgspec.structs.replace(CAPACITY, parts=())
    for core in (core_of(processor, texts), core_of(None)):
        with raises("images_not_supported", "takes no images"):
            await admit(core, prompt_token_ids=(5, 6), images=(file(SMALL),))
    scored = core_of(processor, reference_model_path="tiny")
    with raises("images_not_supported", "reference model"):
        await admit(scored, prompt=MARK, images=(file(SMALL),))


# --- the wire ----------------------------------------------------------------------------------


def test_images_go_over_the_bus_as_bytes_or_base64() -> None:
    data = saved(SMALL)
    request = GenerateRequest(prompt=MARK, images=(ImageInput(data=data),))
    kind, raw = encode_request(request)
    assert kind == "msgpack"
    assert len(raw) < len(data) + 100, "not a third longer"
    assert decode_request(raw, "msgpack", 1 << 20) == request
    json = msgspec.json.encode(request)
    assert decode_request(json, "json", 1 << 20) == request
    given = msgspec.json.decode(json)
    assert check_request(given, 1 << 20) == request
    kind, raw = encode_request(given)
    assert decode_request(raw, "msgpack", 1 << 20) == request
    lines = base64.encodebytes(data).decode()
    for text in (lines, lines.rstrip("=\n")):
        given["images"][0]["data"] = text
        assert check_request(given, 1 << 20) == request
        assert decode_request(msgspec.json.encode(given), "json", 1 << 20) == request
    given["images"][0]["data"] = "no base64!"
    assert isinstance(decode_request(msgspec.json.encode(given), "json", 1 << 20), Malformed)
    assert isinstance(check_request(given, 1 << 20), Malformed)
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}
    read = check_request({"messages": [parts]}, 1 << 20)
    assert isinstance(read, GenerateRequest)
    assert read.messages == (ChatMessage(role="user", content=(TextPart(text="a"), ImagePart())),)


def test_no_file_is_logged() -> None:
    request = GenerateRequest(prompt=MARK, images=(file(SMALL),))
    assert without_files(request) == msgspec.structs.replace(request, images=(ImageInput(),))


# --- the store ---------------------------------------------------------------------------------


class Held:
    """Images of requests in a store in memory."""

    def __init__(self, core: AdmissionCore, store_bytes: int = 120_000_000) -> None:
        self.core, self.store = core, MemoryImages()
        config = ImagesConfig(store_bytes=store_bytes, max_pixels=7000)
        self.images = HeldImages(self.store, config, durable=True)

    async def put(self, number: int, *images: ImageInput, **who: str) -> Tokens:
        request = GenerateRequest(prompt=MARK * len(images), images=images, **who)
        return await load(self.core, RequestEntry(f"{number}-0", request), self.images)


async def test_images_are_held_until_their_request_is_answered(core: AdmissionCore) -> None:
    held = Held(core)
    tokens = await held.put(1, file(SMALL), file(WIDE))
    kept = await held.store.get(media_of(tokens)[1].name)
    assert kept is not None
    assert (kept.width, kept.height) == WIDE.size
    assert (await held.store.usage()).held == 2
    await held.put(2, ImageInput(id=id_of(SMALL)))
    await held.images.release("1-0")
    assert (await held.store.usage()).held == 1
    await held.images.release("2-0")
    await held.images.release("2-0")
    assert (await held.store.usage()).held == 0


async def test_a_full_store_refuses_and_says_when_to_come_back(core: AdmissionCore) -> None:
    one = media_of(await Held(core).put(1, file(SMALL)))[0].num_tokens
    held = Held(core, store_bytes=3 * core.part(Images).num_bytes(one))
    await held.put(1, file(SMALL), tenant="a")
    with raises("images_full", "the tenant's requests", retry_after_s=1.0):
        await held.put(2, file(SMALL), tenant="a")
    with raises("image_too_large", "half of images.store_bytes"):
        await held.put(3, file(SMALL), file(SMALL), tenant="a")
    await held.put(4, file(SMALL), tenant="b")
    await held.put(5, file(SMALL), tenant="c")
    with raises("images_full", "the store of", retry_after_s=1.0):
        await held.put(6, file(SMALL), tenant="d")
    for number in (1, 2, 3):
        await held.images.release(f"{number}-0")
    await held.put(2, file(SMALL), tenant="a")


async def test_tenants_share_no_image_and_salts_no_embeddings(core: AdmissionCore) -> None:
    """Embeddings are found by key, and an image also by id."""
    held, by_id = Held(core), ImageInput(id=id_of(SMALL))
    (one,) = media_of(await held.put(1, file(SMALL), tenant="a"))
    with raises("unknown_image", "for this tenant"):
        await held.put(2, by_id, tenant="b")
    (other,) = media_of(await held.put(2, file(SMALL), tenant="b"))
    (salted,) = media_of(await held.put(3, by_id, tenant="a", cache_salt="s"))
    (same,) = media_of(await held.put(4, by_id, tenant="a"))
    assert len({one.name, other.name}) == 2
    assert len({one.key, other.key, salted.key}) == 3
    assert (same.name, same.key) == (one.name, one.key)


async def test_with_shared_prefixes_images_are_shared_too(processor: ImageProcessor) -> None:
    admission = AdmissionConfig(share_prefixes_across_tenants=True)
    held = Held(core_of(processor, admission=admission))
    name = media_of(await held.put(1, file(SMALL), tenant="a"))[0].name
    assert media_of(await held.put(2, file(SMALL), tenant="b"))[0].name == name


async def test_another_lane_takes_the_leases_over(core: AdmissionCore) -> None:
    held = Held(core)
    await held.put(1, file(SMALL))
    other = HeldImages(held.store, ImagesConfig(), durable=True)
    media = media_of(await held.put(1, file(SMALL)))
    assert not await other.missing("1-0", media)
    held.images.forget(["1-0"])
    await held.images.release("1-0")
    assert (await held.store.usage()).held == 1
    await other.release("1-0")
    assert (await held.store.usage()).held == 0


async def test_leases_are_renewed_and_lost_images_noticed(core: AdmissionCore) -> None:
    held, now = Held(core), 0.0
    held.store._now_s = lambda: now
    media = media_of(await held.put(1, file(SMALL)))
    now = 299.0
    await held.images.renew()
    now = 598.0
    assert (await held.store.usage()).held == 1
    assert not await held.images.missing("1-0", media)
    held.store._images.clear()
    assert await held.images.missing("1-0", media)


def test_the_folder_of_a_text_model_is_unchanged(tmp_path: Path) -> None:
    assert ImageProcessor.of(tmp_path) is None
