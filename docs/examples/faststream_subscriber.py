"""A FastStream subscriber: questions on one Redis stream, their answers on another.

Workers: faststream run faststream_subscriber:app. A question: python faststream_subscriber.py
"""

import asyncio
import json
import os
import uuid
from contextlib import suppress

import redis.asyncio
from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub
from pydantic import BaseModel

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6390")
WORKER = {"group": "workers", "consumer": f"worker-{os.getpid()}"}
broker = RedisBroker(URL)
app = FastStream(broker)
server = redis.asyncio.from_url(URL)


class Question(BaseModel):
    id: str
    prompt: str


class Answer(BaseModel):
    id: str
    text: str


@app.on_startup
async def begin_at_the_first_question() -> None:
    with suppress(redis.ResponseError):  # the group exists
        await server.xgroup_create("questions", "workers", "0", mkstream=True)


# The second takes over the questions of a killed worker.
@broker.subscriber(stream=StreamSub("questions", **WORKER))
@broker.subscriber(stream=StreamSub("questions", **WORKER, min_idle_time=30_000))
@broker.publisher(stream="answers")
async def answer(question: Question) -> Answer:
    """Return the answer. Of a question that comes again it is generated once, as its request has
    the question's id."""
    request = {"request_id": f"question-{question.id}", "prompt": question.prompt}
    request |= {"sampling": {"temperature": 0}, "stream": False}
    await server.xadd("nano:requests", {"json": json.dumps(request)})
    key, found = f"nano:out:question-{question.id}", []
    while not found:  # without a stream the completion is the only output
        await server.xread({key: "0"}, count=1, block=5000)
        found = await server.xrange(key)
    completion = json.loads(found[0][1][b"json"])
    if completion["status"] != "done":
        raise RuntimeError(completion["error"]["message"])
    return Answer(id=question.id, text=completion["samples"][0]["text"])


async def ask(prompt: str) -> str:
    """Publish a question, and return the text of its answer."""
    question = Question(id=uuid.uuid4().hex, prompt=prompt)
    last = await server.xrevrange("answers", count=1)
    answers, found = RedisBroker(URL), asyncio.get_running_loop().create_future()

    @answers.subscriber(stream=StreamSub("answers", last_id=last[0][0].decode() if last else "0"))
    async def take(answer: Answer) -> None:
        if answer.id == question.id:
            found.set_result(answer.text)

    async with answers:
        await answers.start()
        await answers.publish(question, stream="questions")
        return await asyncio.wait_for(found, 120)


if __name__ == "__main__":
    print("answer:", asyncio.run(ask("98 + 25 =")))
