"""The Redis keys, and the fields of their entries. This is the interface for other languages.

{prefix}:requests          stream, one entry per request: `json` (a GenerateRequest as a JSON
                           object) or `msgpack` (the same), and optionally `traceparent`,
                           `tracestate` and `model`, which wins over the request's own
{prefix}:out:{request_id}  stream, the request's outputs in order, ids `<epoch>-<n>`,
                           n counting the entries:
                           `json` (a CompletionChunk, at the end a Completion)
{prefix}:results           stream, every request's Completion: `json`
{prefix}:dead              stream of requests that were given up: `json` (a DeadLetter)
{prefix}:own:{request_id}  the entry that has this request id, while it is in use
{prefix}:epoch             counter
{prefix}:wake:{id}         stream that interrupts a blocking read; not on a cluster (internal)
{prefix}:stages            stream, what each process tells of its stages: `json` (StageReports)
{prefix}:weights:{lane}    the lane's newest weights: JSON (WeightsInPlace)
{prefix}:adapters:{lane}   the lane's adapters: JSON (AdaptersInPlace)
{prefix}:reply:{id}        list, what became of an operation in each lane: JSON (Outcome)
{prefix}:call:{id}         hash, what a gateway keeps of a call: `record`, and by request id the
                           entries (`entry:{request_id}`) (internal)
{prefix}:name:{name}       the call that has this name (internal)
{prefix}:attended          sorted set, until when each call of a gateway is attended (internal)
{prefix}:policy            hash, who may do what: `document` and its `version` (internal)

In a deployment of several models the requests stream is the entrance, from which each request is
moved to the stream of its model. Of what is said here for a lane, each model has its own:

{{prefix}:requests}:of:{model}     stream, the entries of {prefix}:requests for one model, by the
                                   ids that they had there (internal)
{{prefix}:requests}:models         hash, by id: JSON (ModelRecord)
{{prefix}:requests}:closed         hash, by id why a model takes no requests (internal)
{prefix}:stages:{model}            as {prefix}:stages

Here a brace is a brace: a cluster keeps keys of the same tag in one place, and a key without a tag
where it would keep the tag that says the same.

{{prefix}:requests}:lanes  hash, for each lane when its lease ends and who keeps it (internal)
{{prefix}:requests}:begun  hash, for each lane how many of its requests have begun, and until when
                           that counts (internal)
{{prefix}:requests}:queue_length  how many requests wait to begin; gone when no lane lives
{{prefix}:limits}:window:{s}:{name} hash, what each gateway has taken from a limit (internal)
{{prefix}:limits}:held:{name} hash, what each gateway holds of a limit, and until when (internal)
{{prefix}:limits}:servers  hash, since when each process has counted these (internal)
{{prefix}:results}:told:{digest} marks an entry whose Completion the results stream has (internal)
{{prefix}:link:{lane}}:{link} stream between two stages (internal): `w` the writer, `m` the message

Every script and transaction names keys of one family only, and so does every read of several
streams: the requests and who has them; the results stream and its marks; the links of one lane;
limits; each other key alone.
"""

from __future__ import annotations

import hashlib

JSON = b"json"
MSGPACK = b"msgpack"
REFUSED = b"refused"
TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
MODEL = b"model"
WRITER = b"w"
MESSAGE = b"m"


class Keys:
    """The names of everything below one prefix."""

    def __init__(self, prefix: str, lane: str = "0", model: str = "") -> None:
        """`prefix`: of a deployment. `model`: of its models, "" where it has but one. `lane`: the
        one of these links."""
        self._prefix = prefix
        self.model = model
        # Neither has a colon that could be mistaken: a lane has none, and it comes last.
        self._lane_prefix = f"{model}:" if model else ""
        self._lane = lane
        self.entrance = self._key("requests")
        of_model = f":{model}" if model else ""
        self.requests = self.requests_of(model)
        self.models = beside(self.entrance, "models")
        self.closed = beside(self.entrance, "closed")
        self.results = self._key("results")
        self.dead = self._key("dead")
        self.epoch = self._key("epoch")
        self.lanes = beside(self.entrance, f"lanes{of_model}")
        self.begun = beside(self.entrance, f"begun{of_model}")
        self.queue_length = beside(self.entrance, f"queue_length{of_model}")
        self.stages = self._key(f"stages{of_model}")
        self.weights = self._key(f"weights:{self._lane_prefix}{lane}")
        self.adapters = self._key(f"adapters:{self._lane_prefix}{lane}")
        self.attended = self._key("attended")
        self._limits = self._key("limits")
        self.limits_servers = beside(self._limits, "servers")
        self.policy = self._key("policy")

    def requests_of(self, model: str) -> bytes:
        """A model's requests stream, in the same place of a cluster as all others."""
        return beside(self.entrance, f"of:{model}") if model else self.entrance

    def out(self, key: str) -> bytes:
        """The stream of one request. Any text is a valid key, a lone surrogate too."""
        return self._key(f"out:{key}")

    def own(self, key: str) -> bytes:
        """Whose entry has the key."""
        return self._key(f"own:{key}")

    def told(self, key: str, entry_id: str) -> bytes:
        """Marks that an entry's terminal message is in the results stream, for a while.

        Args:
            key: Of the stream that it ends.
        """
        text = f"{len(key)}:{key}{entry_id}".encode("utf-8", "surrogatepass")
        return beside(self.results, f"told:{hashlib.sha1(text).hexdigest()}")

    def link(self, name: str, lane: str | None = None) -> bytes:
        """A link of this lane, or of another."""
        lane = self._lane if lane is None else lane
        return beside(self._key(f"link:{self._lane_prefix}{lane}"), name)

    def reply(self, operation_id: str) -> bytes:
        return self._key(f"reply:{operation_id}")

    def call(self, call_id: str) -> bytes:
        return self._key(f"call:{call_id}")

    def name(self, name: str) -> bytes:
        return self._key(f"name:{name}")

    def limits_window(self, name: str, window_s: int) -> bytes:
        """What was taken from a limit; one of another window begins anew."""
        return beside(self._limits, f"window:{window_s}:{name}")

    def limits_held(self, name: str) -> bytes:
        return beside(self._limits, f"held:{name}")

    def wake(self, name: str) -> bytes:
        return self._key(f"wake:{name}")

    def _key(self, rest: str) -> bytes:
        return f"{self._prefix}:{rest}".encode("utf-8", "surrogatepass")


def beside(key: bytes, name: str) -> bytes:
    """Another key in the same hash slot of a cluster. `key` has no braces."""
    return b"{%s}:%s" % (key, name.encode("utf-8", "surrogatepass"))


def parse_id(raw: bytes) -> tuple[int, int]:
    """A stream entry's id as numbers, which compare in the order of the stream."""
    milliseconds, _, number = raw.partition(b"-")
    return int(milliseconds), int(number)


def id_after(raw: bytes) -> str:
    """The smallest id above this one."""
    milliseconds, number = parse_id(raw)
    return f"{milliseconds}-{number + 1}"
