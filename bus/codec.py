"""Encoding and decoding of messages. Decoding a client's bytes never raises.

Between stages: msgpack arrays. Public messages: JSON objects; requests also as msgpack objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from ..config import SamplingParams, cut, cut_middle, line_safe, shown
from ..config.quoting import is_unicode
from ..text.forgiving_base64 import decode_base64
from .entries import Malformed
from .envelope import Envelope
from .public import DEFAULT_TENANT, AnyRequest, GenerateRequest, Output

Encoding = Literal["json", "msgpack"]

# Besides its own errors msgspec raises UnicodeDecodeError; for very long integers ValueError; for
# nesting beyond the interpreter's limit RecursionError; for values without a wire form TypeError
# and OverflowError.
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

UNSENDABLE = "invalid_request"
"""Code of a request that its client could not encode."""

_NOT_UNICODE = "the request holds text that is not Unicode (a lone surrogate)"
_NESTED = "the request is nested too deeply"
_BEYOND_64_BITS = "the request holds an integer that does not fit in 64 bits"
_NOT_PLAIN = "the request must be plain data (str, int, float, bool, list, dict)"
_SENTENCES = frozenset({_NOT_UNICODE, _NESTED, _BEYOND_64_BITS, _NOT_PLAIN})


_Request = TypeVar("_Request")


class _AskedModel(msgspec.Struct, frozen=True):
    model: str = ""


class _AskedTenant(msgspec.Struct, frozen=True):
    tenant: str = DEFAULT_TENANT


_envelope_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()
_readers: dict[Encoding, Callable[[bytes], Any]] = {
    "json": msgspec.json.decode,
    "msgpack": msgspec.msgpack.decode,
}
_model_readers: dict[Encoding, Callable[[bytes], _AskedModel]] = {
    "json": msgspec.json.Decoder(_AskedModel).decode,
    "msgpack": msgspec.msgpack.Decoder(_AskedModel).decode,
}
_read_tenant = msgspec.json.Decoder(_AskedTenant).decode
_request_readers: dict[Encoding, Callable[[bytes], GenerateRequest]] = {
    "json": msgspec.json.Decoder(GenerateRequest).decode,
    "msgpack": msgspec.msgpack.Decoder(GenerateRequest).decode,
}

encode_envelope = _envelope_encoder.encode
# Both raise ValueError (msgspec's errors are subclasses) or RecursionError.
decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
decode_output: Callable[[bytes], Output] = msgspec.json.Decoder[Output](Output).decode


def encode_output(output: Output) -> bytes:
    """Encode a CompletionChunk or Completion as a JSON object with a `type`, in one line."""
    return line_safe(_json_encoder.encode(output))


def decode_request(raw: bytes, encoding: Encoding, max_bytes: int) -> GenerateRequest | Malformed:
    """Decode a request from bytes. Never raises.

    The code of an unreadable one is "request_too_large" (checked before parsing), "malformed"
    (`raw` is not `encoding`), or "invalid_request" (not a request; the message ends with the
    error's path). Numbers are checked for type only, integers for 64 signed bits; admission checks
    the ranges.
    """
    if len(raw) > max_bytes:
        said = f"the request has {len(raw)} bytes; at most {max_bytes} are taken"
        return Malformed("", "request_too_large", f"{said} (bus.max_request_bytes)")
    try:
        return _with_schema_text(_request_readers[encoding](raw))
    except _UNREADABLE as error:
        if encoding == "json" and (found := _with_any_base64(raw)) is not None:
            return found
        return _explain(raw, encoding, error)


def _with_any_base64(raw: bytes) -> GenerateRequest | None:
    """Return a request whose images are in base64 with line breaks or without padding, which
    msgspec refuses; None if that isn't its fault."""
    try:
        given = msgspec.json.decode(raw)
        if (plain := _with_image_bytes(given)) is given:
            return None
        packed = _envelope_encoder.encode(_with_schema_text(_with_integer_keys(plain)))
        return _with_schema_text(_request_readers["msgpack"](packed))
    except _UNREADABLE:
        return None


def decode_model(raw: bytes, encoding: Encoding) -> str:
    """Return a request's model, at a tenth of the cost of decoding it; "" if unreadable. Never
    raises."""
    try:
        return _model_readers[encoding](raw).model
    except _UNREADABLE:
        return ""


def check_request(request: AnyRequest, max_bytes: int) -> GenerateRequest | Malformed:
    """Check a request of a client in this process as strictly as on the wire.

    Bytes are JSON. A struct or dict goes through msgpack, which finds in one pass what other
    processes couldn't decode: values of the wrong type (a struct doesn't check when built), objects
    that aren't plain data, integers beyond 64 bits, text that isn't Unicode. Never raises.
    """
    if isinstance(request, bytes):
        return decode_request(request, "json", max_bytes)
    try:
        plain = _with_image_bytes(_with_integer_keys(request))
        raw = _envelope_encoder.encode(_with_schema_text(plain))
    except _UNREADABLE as error:
        return Malformed(named_id(request), UNSENDABLE, _unsendable(error))
    checked = decode_request(raw, "msgpack", max_bytes)
    if isinstance(checked, Malformed) and not checked.request_id:
        return msgspec.structs.replace(checked, request_id=named_id(request))
    return checked


def encode_request(request: AnyRequest) -> tuple[str, bytes]:
    """Encode a request as an entry of the requests stream: the field's name, and its value.

    The field is "json"; "msgpack" if a number is not finite, which JSON can't represent, or with
    images, which JSON makes a third larger; "refused" (a `Malformed`) if the object can't be
    encoded. Never raises.
    """
    if isinstance(request, bytes):
        return "json", request
    try:
        if _has_nonfinite(request) or _member(request, "images"):
            plain = _with_image_bytes(request)
            return "msgpack", _envelope_encoder.encode(_with_schema_text(plain))
        return "json", _json_encoder.encode(request)
    except _UNREADABLE as error:
        refused = Malformed(named_id(request), UNSENDABLE, _unsendable(error))
        return "refused", _json_encoder.encode(refused)


def decode_refused(raw: bytes) -> Malformed:
    """Decode a client's note that it could not encode a request (see `encode_request`). Never
    raises.

    Any client may write such a note, so it is untrusted: only the code of `encode_request` is
    accepted, and of the message only the package's own sentences; the rest is quoted and cut.
    """
    try:
        refused = msgspec.json.decode(raw, type=Malformed)
    except _UNREADABLE:
        return Malformed("", "malformed", "the field 'refused' can't be read")
    if refused.code != UNSENDABLE:
        return Malformed("", "malformed", "the field 'refused' has a code that no client gives")
    sentence, _, detail = refused.message.partition(": ")
    if sentence not in _SENTENCES:
        sentence, detail = "the client could not send the request", refused.message
    return Malformed(
        refused.request_id, UNSENDABLE, f"{sentence}: {shown(detail)}" if detail else sentence
    )


def named_id(request: object) -> str:
    """Return the request id of an unchecked struct or dict; "" if there is no usable one."""
    value = _member(request, "request_id")
    return value if isinstance(value, str) and is_unicode(value) else ""


def written_id(request: AnyRequest) -> str:
    """Return `named_id`, also for JSON."""
    if isinstance(request, bytes):
        try:
            return named_id(msgspec.json.decode(request))
        except _UNREADABLE:
            return ""
    return named_id(request)


def written_tenant(request: AnyRequest) -> str:
    """Return the tenant of an unchecked request, the default one if it names none."""
    tenant: object
    if isinstance(request, bytes):
        try:
            tenant = _read_tenant(request).tenant
        except _UNREADABLE:
            return DEFAULT_TENANT
    else:
        tenant = _member(request, "tenant")
    return tenant if isinstance(tenant, str) and is_unicode(tenant) else DEFAULT_TENANT


def _has_nonfinite(request: GenerateRequest | dict[str, Any]) -> bool:
    """Return whether sampling, which has the only floats of a request, holds NaN or an infinity."""
    sampling = _member(request, "sampling")
    if isinstance(sampling, SamplingParams):
        sampling = msgspec.structs.asdict(sampling)
    return isinstance(sampling, dict) and _is_nonfinite(sampling)


def _is_nonfinite(value: object) -> bool:
    """Return whether a value is NaN or infinite, or a dict (a logit_bias) that contains one."""
    if isinstance(value, dict):
        return any(map(_is_nonfinite, value.values()))
    return isinstance(value, float) and not math.isfinite(value)


def _with_integer_keys(request: GenerateRequest | dict[str, Any]) -> object:
    """Return the request with integer keys in logit_bias, which JSON writes as text."""
    sampling = request.get("sampling") if isinstance(request, dict) else None
    bias = sampling.get("logit_bias") if isinstance(sampling, dict) else None
    if not isinstance(bias, dict) or not any(isinstance(key, str) for key in bias):
        return request
    assert isinstance(request, dict)
    assert isinstance(sampling, dict)
    try:
        bias = msgspec.convert(bias, dict[int, Any], str_keys=True)
    except msgspec.ValidationError:
        return request
    return {**request, "sampling": {**sampling, "logit_bias": bias}}


def _with_image_bytes(request: Any) -> Any:
    """Return a dict with files of images as bytes, which JSON writes as base64."""
    images = request.get("images") if isinstance(request, dict) else None
    if not isinstance(images, list | tuple):
        return request
    found: list[Any] = []
    for image in images:
        data = _member(image, "data")
        if isinstance(image, dict) and isinstance(data, str):
            try:
                image = {**image, "data": decode_base64(data)}
            except ValueError:
                return request  # reading it will report the error
        found.append(image)
    return {**request, "images": found}


def _with_schema_text(request: _Request) -> _Request:
    """Return the request with a constraint's schema as text: JSON has integers beyond 64 bits,
    MessagePack doesn't.
    """
    sampling = _member(request, "sampling")
    constraint = _member(sampling, "constraint")
    schema = _member(constraint, "json_schema")
    if not isinstance(schema, dict):
        return request
    try:
        text = _json_encoder.encode(schema).decode()
    except _UNREADABLE:
        # Encoding the request will report the error.
        return request
    constraint = _replaced(constraint, "json_schema", text)
    replaced: _Request = _replaced(
        request, "sampling", _replaced(sampling, "constraint", constraint)
    )
    return replaced


def _member(value: object, name: str) -> object:
    """Return a field of a struct or a dict; None of other values."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _replaced(value: Any, name: str, new: object) -> Any:
    """Return a struct or a dict with one field replaced."""
    if isinstance(value, dict):
        return {**value, name: new}
    return msgspec.structs.replace(value, **{name: new})


def _explain(raw: bytes, encoding: Encoding, error: Exception) -> Malformed:
    """Distinguish unparseable bytes from parseable ones that aren't a request.

    A typed decoder stops at the first wrong field, so the whole is parsed again to check the rest
    and find the request's id.
    """
    name = "JSON" if encoding == "json" else "MessagePack"
    try:
        tree = _readers[encoding](raw)
    except UnicodeDecodeError:
        return Malformed("", "malformed", f"the request is not {name} with text in UTF-8")
    except RecursionError:
        return Malformed("", "malformed", _NESTED)
    except _UNREADABLE as unparsed:
        return Malformed(
            "", "malformed", cut_middle(f"the request is not valid {name}: {unparsed}")
        )
    # msgspec's message contains client input, and ends with the position.
    if isinstance(error, msgspec.ValidationError):
        from ..config.wrong_values import told_of

        return Malformed(named_id(tree), "invalid_request", told_of(error, "", tree))
    return Malformed(named_id(tree), "malformed", cut_middle(f"the request can't be read: {error}"))


def _unsendable(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return _NOT_UNICODE
    if isinstance(error, RecursionError):
        return _NESTED
    if isinstance(error, OverflowError):
        return _BEYOND_64_BITS
    return cut(f"{_NOT_PLAIN}: {error}")
