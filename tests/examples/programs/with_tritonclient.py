"""Triton's client, over HTTP and gRPC, as vLLM's backend of Triton is called."""

from __future__ import annotations

import json
import os
import queue
from typing import Any

import given
import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from promises import LIMIT_S, URL, cancels, keep, promise, raises, wait_in_flight
from tritonclient.utils import InferenceServerException

ADDRESSES = {
    tritonclient.http: URL.removeprefix("http://"),
    tritonclient.grpc: os.environ["NANO_INFERENCE_GRPC"],
}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


def inputs(triton: Any, text: str, stream: bool = False, **sampling: object) -> list[Any]:
    fields = {
        "text_input": np.array([text.encode()], dtype=np.object_),
        "stream": np.array([stream]),
        "sampling_parameters": np.array([json.dumps(sampling).encode()], dtype=np.object_),
    }
    if not stream:
        fields["exclude_input_in_output"] = np.array([True])
    made = []
    for name, value in fields.items():
        kind = "BOOL" if value.dtype == np.bool_ else "BYTES"
        each = triton.InferInput(name, list(value.shape), kind)
        each.set_data_from_numpy(value)
        made.append(each)
    return made


def text_of(answer: Any) -> str:
    (text,) = answer.as_numpy("text_output")
    return text.decode()


@promise
def answer_has_text_and_usage() -> None:
    for triton, address in ADDRESSES.items():
        with triton.InferenceServerClient(address) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready(given.MODEL)
            asked = inputs(triton, "98 + 25 =", temperature=0)
            names = ("text_output", "num_input_tokens", "num_output_tokens")
            wanted = [triton.InferRequestedOutput(name) for name in names]
            answer = client.infer(given.MODEL, asked, outputs=wanted)
            assert text_of(answer).strip() == "123"
            assert answer.as_numpy("num_input_tokens")[0] > 0
            assert answer.as_numpy("num_output_tokens")[0] > 0


@promise
def stream_is_the_answer_in_parts() -> None:
    with tritonclient.grpc.InferenceServerClient(ADDRESSES[tritonclient.grpc]) as client:
        whole = text_of(
            client.infer(given.MODEL, inputs(tritonclient.grpc, "98 + 25 =", temperature=0))
        )
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        asked = inputs(tritonclient.grpc, "98 + 25 =", True, temperature=0)
        client.async_stream_infer(given.MODEL, asked, enable_empty_final_response=True)
        text, final = "", False
        while not final:
            result, error = answers.get(timeout=LIMIT_S)
            assert error is None
            final = result.get_response().parameters["triton_final_response"].bool_param
            if result.as_numpy("text_output") is not None:
                text += text_of(result)
        client.stop_stream()
    assert text == whole


@promise
def answer_keeps_its_schema() -> None:
    for triton, address in ADDRESSES.items():
        with triton.InferenceServerClient(address) as client:
            asked = inputs(triton, "Ben is ", structured_outputs={"json": SCHEMA}, max_tokens=100)
            assert json.loads(text_of(client.infer(given.MODEL, asked))).keys() == {"age"}


@promise
def tensors_go_through_shared_memory() -> None:
    ids = np.array([[*b"98 + 25 ="]], dtype=np.int64) % 200
    for triton, address in ADDRESSES.items():
        region = shm.create_shared_memory_region("ids", f"/ids-{os.getpid()}", ids.nbytes)
        try:
            shm.set_shared_memory_region(region, [ids[0]])
            with triton.InferenceServerClient(address) as client:
                client.register_system_shared_memory("ids", f"/ids-{os.getpid()}", ids.nbytes)
                shared = triton.InferInput("input_ids", [ids.size], "INT64")
                shared.set_shared_memory("ids", ids.nbytes)
                answer = client.infer(
                    f"{given.MODEL}.tokens", [shared], parameters={"temperature": 0.0}
                )
                inside = triton.InferInput("input_ids", [ids.size], "INT64")
                inside.set_data_from_numpy(ids[0])
                same = client.infer(
                    f"{given.MODEL}.tokens", [inside], parameters={"temperature": 0.0}
                )
                name = "output_ids"
                assert (answer.as_numpy(name) == same.as_numpy(name)).all()
                client.unregister_system_shared_memory("ids")
        finally:
            shm.destroy_shared_memory_region(region)


@promise
def errors_have_their_class_and_sentence() -> None:
    for triton, address in ADDRESSES.items():
        with triton.InferenceServerClient(address) as client:
            with raises(InferenceServerException, "none"):
                client.infer("none", inputs(triton, "a"))
            with raises(InferenceServerException, str(given.CONTEXT_LENGTH)):
                client.infer(given.MODEL, inputs(triton, "a " * given.CONTEXT_LENGTH))
            with raises(InferenceServerException, "top_p"):
                client.infer(given.MODEL, inputs(triton, "a", top_p=7))


@promise
def cancelled_call_cancels_its_request() -> None:
    endless = {"max_tokens": given.ENDLESS_TOKENS, "ignore_eos": True}
    address = ADDRESSES[tritonclient.grpc]
    with tritonclient.grpc.InferenceServerClient(address) as client:
        answers: queue.Queue[Any] = queue.Queue()
        with cancels():
            asked = inputs(tritonclient.grpc, "a", n=32, **endless)
            call = client.async_infer(
                given.MODEL, asked, lambda result, error: answers.put((result, error))
            )
            wait_in_flight()
            call.cancel()
        with cancels():
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer(given.MODEL, inputs(tritonclient.grpc, "a", True, **endless))
            wait_in_flight()
            client.stop_stream(cancel_requests=True)
    with (
        cancels(),
        raises(Exception),
        tritonclient.http.InferenceServerClient(
            ADDRESSES[tritonclient.http], network_timeout=1.0
        ) as client,
    ):
        client.infer(given.MODEL, inputs(tritonclient.http, "a", n=32, **endless))


keep()
