"""The Redis keys, and the fields of their entries. This is the interface for other languages.

{prefix}:requests          stream, one entry per request: `json` (a GenerateRequest as a JSON
                           object) or `msgpack` (the same), and optionally `traceparent` and
                           `tracestate`
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
{prefix}:reply:{id}        list, what became of an operation in each lane: JSON (Outcome)
{prefix}:call:{id}         hash, what a gateway keeps of a call: `record`, and by request id the
                           entries (`entry:{request_id}`) (internal)
{prefix}:name:{name}       the call that has this name (internal)
{prefix}:attended          sorted set, until when each call of a gateway is attended (internal)
{prefix}:policy            hash, who may do what: `document` and its `version` (internal)

Here a brace is a brace: a cluster keeps keys of the same tag in one place, and a key without a tag
where it would keep the tag that says the same.

{{prefix}:requests}:lanes  hash, for each lane when its lease ends and who keeps it (internal)
{{prefix}:requests}:begun  hash, for each lane how many of its requests have begun, and until when
                           that counts (internal)
{{prefix}:requests}:queue_length  how many requests wait to begin; gone when no lane lives
{{prefix}:limits}:window:{s}:{name} hash, what each gateway has taken from a limit (internal)
{{prefix}:limits}:held:{name} hash, what each gateway holds of a limit, and until when (internal)
{{prefix}:limits}:servers  hash, since when each process has counted these (internal)
{{prefix}:results}:told:{digest} marks a message that the results stream has (internal)
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
WRITER = b"w"
MESSAGE = b"m"


class Keys:
    """The names of everything below one prefix."""

    def __init__(self, prefix: str, lane: str = "0") -> None:
        """`prefix`: of all lanes that serve the same requests. `lane`: the one of these links."""
        self._prefix = prefix
        self._lane = lane
        self.requests = self._key("requests")
        self.results = self._key("results")
        self.dead = self._key("dead")
        self.epoch = self._key("epoch")
        self.lanes = beside(self.requests, "lanes")
        self.begun = beside(self.requests, "begun")
        self.queue_length = beside(self.requests, "queue_length")
        self.stages = self._key("stages")
        self.weights = self._key(f"weights:{lane}")
        self.attended = self._key("attended")
        self._limits = self._key("limits")
        self.limits_servers = beside(self._limits, "servers")
        self.policy = self._key("policy")

    def out(self, key: str) -> bytes:
        """The stream of one request. Any text is a valid key, a lone surrogate too."""
        return self._key(f"out:{key}")

    def own(self, key: str) -> bytes:
        """Whose entry has the key."""
        return self._key(f"own:{key}")

    def told(self, raw: bytes) -> bytes:
        """Marks that a terminal message is in the results stream, for a while."""
        return beside(self.results, f"told:{hashlib.sha1(raw).hexdigest()}")

    def link(self, name: str, lane: str | None = None) -> bytes:
        """A link of this lane, or of another."""
        return beside(self._key(f"link:{self._lane if lane is None else lane}"), name)

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
