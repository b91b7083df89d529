"""A Celery task that generates over Redis.

Worker: celery -A celery_task worker. A call of the task: python celery_task.py
"""

import json
import os

import redis
from celery import Celery

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6390")
app = Celery("celery_task", broker=URL, backend=URL)
# After so long without an end a task is another worker's: longer than any task takes.
app.conf.broker_transport_options = {"visibility_timeout": 30}
server = redis.from_url(URL, decode_responses=True)


# A task whose worker was killed is run again, under the same id.
@app.task(bind=True, acks_late=True, task_reject_on_worker_lost=True)
def complete(self, prompt: str) -> str:
    """Return the completion of a prompt.

    The request has the task's id, so that a task that is run again reads the first one's output:
    its own request is refused as a duplicate, and nothing is generated twice.
    """
    request_id = f"celery-{self.request.id}"
    request = {"request_id": request_id, "prompt": prompt, "sampling": {"temperature": 0}}
    server.xadd("nano:requests", {"json": json.dumps(request | {"stream": False})})
    key, found = f"nano:out:{request_id}", []
    while not found:  # without a stream the completion is the only output
        server.xread({key: "0"}, count=1, block=5000)
        found = server.xrange(key)
    completion = json.loads(found[0][1]["json"])
    if completion["status"] != "done":
        raise RuntimeError(completion["error"]["message"])
    return completion["samples"][0]["text"]


if __name__ == "__main__":
    print("answer:", complete.delay("98 + 25 =").get(timeout=120))
