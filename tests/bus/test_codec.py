"""The codec alone: it never raises on what a client sends, and loses nothing of what we send."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nano_inference.bus import Malformed, codec
from nano_inference.bus.codec import decode_output
from nano_inference.bus.envelope import Envelope
from nano_inference.bus.messages import Credit
from nano_inference.bus.public import ErrorInfo, GenerateRequest
from nano_inference.config import Constraint, SamplingParams

from .. import kit

LIMIT = 1 << 20
CODES = {"malformed", "invalid_request", "request_too_large"}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=4,
)
field_names = st.sampled_from([*GenerateRequest.__struct_fields__, "type", "other"])
sampling_names = st.sampled_from([*SamplingParams.__struct_fields__, "other"])
nearly_requests = st.dictionaries(
    field_names, plain | st.dictionaries(sampling_names, plain, max_size=3), max_size=4
)


def check(result: GenerateRequest | Malformed) -> None:
    if isinstance(result, Malformed):
        assert result.code in CODES
        assert result.message
        result.request_id.encode()
    else:
        codec.encode_envelope(Envelope(Credit(1)))
        msgspec.msgpack.encode(result)  # fits on the wire


@settings(deadline=None)
@given(raw=st.binary(max_size=200), encoding=st.sampled_from(["json", "msgpack"]))
@example(raw=b"\xdd\xff\xff\xff\xff", encoding="msgpack")
@example(raw=b"\xdf\xff\xff\xff\xff\x01", encoding="msgpack")
@example(raw=b"\x81\x80\x01", encoding="msgpack")
@example(raw=b"\x81\x91\x01\x01", encoding="msgpack")
@example(raw=b"\x91" * 100_000, encoding="msgpack")
@example(raw=b"\x81\xa1x" * 5_000 + b"\x01", encoding="msgpack")
@example(raw=b'{"a":' * 5_000, encoding="json")
def test_random_bytes_never_raise(raw: bytes, encoding: Any) -> None:
    check(codec.decode_request(raw, encoding, LIMIT))


@pytest.mark.parametrize("bias", [{17: 1.5, 3: -2}, {"17": 1.5, "3": -2}])
def test_token_ids_of_a_bias_may_be_text_as_in_json(bias: dict[Any, float]) -> None:
    request = {"prompt": "x", "sampling": {"logit_bias": bias}}
    checked = codec.check_request(request, LIMIT)
    assert checked.sampling.logit_bias == {17: 1.5, 3: -2.0}
    assert codec.check_request(checked, LIMIT) == checked
    field, body = codec.encode_request(request)
    assert field == "json"
    assert codec.decode_request(body, "json", LIMIT) == checked
    assert request == {"prompt": "x", "sampling": {"logit_bias": bias}}, "it is not changed"


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({"red": 1}, "has the key 'red'; it must be a whole number"),
        ({"1.0": 1}, "has the key '1.0'; it must be a whole number"),
        ({"17": "much"}, "bias.+17.+ is 'much'; it must be a number"),
        ({"9" * 40: 1}, "64 bits|must be a whole number <= 9223372036854775807"),
        ({2**64 - 1: 1}, "64 bits|must be a whole number <= 9223372036854775807"),
    ],
)
def test_a_bias_that_is_none(bias: dict[Any, Any], message: str) -> None:
    request = {"prompt": "x", "sampling": {"logit_bias": bias}}
    for checked in (
        codec.check_request(request, LIMIT),
        codec.decode_request(msgspec.json.encode(request), "json", LIMIT),
    ):
        assert checked.code == "invalid_request"
        assert re.search(message, checked.message)


@pytest.mark.parametrize("name", ["min_tokens", "logprobs", "prompt_logprobs"])
def test_integers_of_sampling_beyond_64_bits(name: str) -> None:
    checked = codec.check_request({"prompt": "x", "sampling": {name: 2**64 - 1}}, LIMIT)
    assert checked.message.startswith(f"sampling.{name} is ")


@pytest.mark.parametrize("as_struct", [False, True])
@pytest.mark.parametrize("bias", [{}, {3: math.nan}])
def test_a_schema_s_integers_beyond_64_bits_are_carried(
    bias: dict[int, float], as_struct: bool
) -> None:
    schema = {"type": "integer", "maximum": 10**30}
    given = {"constraint": {"json_schema": schema}, "logit_bias": bias}
    constraint = Constraint(json_schema=schema)
    sampling = replace(SamplingParams(), constraint=constraint, logit_bias=bias)
    request: Any = GenerateRequest(prompt="x", sampling=sampling)
    if not as_struct:
        request = {"prompt": "x", "sampling": given}
    field, body = codec.encode_request(request)
    assert field == ("msgpack" if bias else "json")
    for checked in (
        codec.check_request(request, LIMIT),
        codec.decode_request(body, "msgpack" if bias else "json", LIMIT),
    ):
        check(checked)
        assert msgspec.json.decode(str(checked.sampling.constraint.json_schema)) == schema


def test_a_bias_that_json_can_not_say_goes_as_msgpack() -> None:
    sampling = replace(SamplingParams(), logit_bias={3: math.nan})
    request = GenerateRequest(prompt="x", sampling=sampling)
    field, body = codec.encode_request(request)
    assert field == "msgpack"
    decoded = codec.decode_request(body, "msgpack", LIMIT)
    assert math.isnan(decoded.sampling.logit_bias[3])


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(nearly=nearly_requests)
def test_nearly_right_requests_never_raise(nearly: dict[str, Any]) -> None:
    check(codec.check_request(nearly, LIMIT))
    field, body = codec.encode_request(nearly)
    if field == "refused":
        check(msgspec.json.decode(body, type=Malformed))
    else:
        check(codec.decode_request(body, field, LIMIT))  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    prompt=st.text(),
    n=st.integers(-(1 << 63), (1 << 63) - 1),
    temperature=st.floats(),
    ids=st.frozensets(st.integers(0, 100), max_size=3),
)
def test_requests_survive_the_wire(
    prompt: str, n: int, temperature: float, ids: frozenset[int]
) -> None:
    sampling = replace(SamplingParams(), temperature=temperature, stop_token_ids=ids)
    request = GenerateRequest(prompt=prompt, n=n, sampling=sampling)
    field, body = codec.encode_request(request)
    assert field == ("json" if math.isfinite(temperature) else "msgpack")
    for result in (
        codec.decode_request(body, field, LIMIT),  # type: ignore[arg-type]
        codec.check_request(request, LIMIT),
    ):
        assert repr(result.sampling.temperature) == repr(temperature)  # NaN equals nothing
        assert (result.prompt, result.n) == (prompt, n)
        assert result.sampling.stop_token_ids == ids


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_size_is_looked_at_before_the_content(encoding: Any) -> None:
    result = codec.decode_request(b"\xc1" * 11, encoding, 10)
    assert result.code == "request_too_large"
    exact = codec.decode_request(b"\xc1" * 10, encoding, 10)
    assert exact.code == "malformed"


def test_messagepack_says_messagepack() -> None:
    result = codec.decode_request(b"\xc1", "msgpack", LIMIT)
    assert "MessagePack" in result.message


def test_an_older_client_reads_messages_of_a_newer_pipeline() -> None:
    raw = b"""{"type":"completion","request_id":"r","entry_id":"1-1","status":"done","new":1,
    "samples":[{"sample_index":0,"text":"a","token_ids":[1],"logprobs":[0],"finish_reason":"stop",
    "new":{"a":1}}],"usage":{"prompt_tokens":1,"new":2},"timings":{"new":[]}}"""
    output = decode_output(raw)
    assert output.samples[0].token_ids == (1,)


def test_an_output_is_one_line_for_every_reader() -> None:
    output = kit.done("r", "1-1")
    error = ErrorInfo(code="c", message="a\u2028b\u2029c\x85d")
    raw = codec.encode_output(msgspec.structs.replace(output, status="error", error=error))
    assert len(raw.decode().splitlines()) == 1
    assert decode_output(raw).error == error
