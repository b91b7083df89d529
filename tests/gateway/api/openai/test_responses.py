"""`/v1/responses`: what is answered, told in a stream, kept, and refused by name."""

from __future__ import annotations

from ...fake import Client, completion, poster
from ...made import TEXTS, told

PATH = "/v1/responses"
TEXT = "".join(TEXTS)


# The engine makes up texts, of which its tokens know nothing.
SETTINGS = {"gateway.message_format": "off"}

posted = poster(PATH, {"input": "hello"})


async def test_an_answer_has_openai_s_fields(http: Client) -> None:
    answer = await posted(http, instructions="Be brief.", metadata={"a": "b"})
    (request,) = http.engine.requests
    assert answer["id"] == request.request_id
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    (item,) = answer["output"]
    assert item["content"] == [
        {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
    ]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 4 + 3
    assert (answer["instructions"], answer["metadata"]) == ("Be brief.", {"a": "b"})


async def test_the_finish_reason_sets_the_status(http: Client) -> None:
    http.engine.outputs = lambda request: [completion(request)]
    answer = await posted(http)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    http.engine.outputs = lambda request: [
        completion(request, told(request, 0, "abort"), status="cancelled")
    ]
    assert (await posted(http))["status"] == "cancelled"
