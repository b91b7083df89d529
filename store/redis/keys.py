"""Redis keys and the fields of their entries: the interface for other languages.

{prefix}:requests          stream, one entry per request: `json` (a GenerateRequest as a JSON
                           object) or `msgpack` (the same), and optionally `traceparent`,
                           `tracestate` and `model`, which overrides the request's own
{prefix}:out:{request_id}  stream, the request's outputs in order, ids `<epoch>-<n>`,
                           n counting the entries:
                           `json` (a CompletionChunk, at the end a Completion)
{prefix}:results           stream, every request's Completion: `json`
{prefix}:requests:{shard}, {prefix}:results:{shard}   the same for the shards 1, 2 and so on; each
                           has the keys beside {prefix}:requests and {prefix}:results of its own
{prefix}:kv_events         stream, a replica's KV events in an entry: `model`, `lane`, `replica`,
                           `incarnation`, `sequence`, and `batch` (KVEventBatch as msgpack)
{prefix}:dead              stream of dead letters: `json` (a DeadLetter)
{prefix}:own:{request_id}  the entry that owns this request id, while it is in use
{prefix}:fork:{entry}      the prompt of a fork in flight, and where it began (internal)
{prefix}:epoch             counter
{prefix}:openings:{lane}   hash, by role the number of the process that opened it last (internal)
{prefix}:wake:{id}         stream that interrupts a blocking read; not on a cluster (internal)
{prefix}:stages            stream, stage reports of each process: `json` (StageReports)
{prefix}:weights:{lane}    the lane's newest weights: JSON (WeightsInPlace)
{prefix}:adapters:{lane}   the lane's adapters: JSON (AdaptersInPlace)
{prefix}:weight_update     hash, a trainer's open update: `state` (WeightUpdateState as JSON), and
                           `labels` of versions (internal)
{prefix}:service           hash, by lane: the service of its tenants (LaneService as msgpack)
                           (internal)
{prefix}:reply:{id}        list, an operation's outcome in each lane: JSON (Outcome)
{prefix}:call:{id}         hash, a durable call: `record`, and by request id the entries
                           (`entry:{request_id}`) (internal)
{prefix}:name:{name}       the durable call that has this name (internal)
{prefix}:stored:{tenant}   hash, bytes of the tenant's durable calls by the period in which they
                           expire (internal)
{prefix}:stored            the same, of all tenants (internal)
{prefix}:tree:{digest}     hash, a session's token tree: its turns, and blocks of their prompts
                           (internal)
{prefix}:trees:{tenant}    hash, bytes of the tenant's token trees by the period in which they
                           expire (internal)
{prefix}:trees             the same, of all tenants (internal)
{prefix}:files:{tenant}    hash, by id the tenant's files: JSON (FileRecord) (internal)
{prefix}:file_expiries     sorted set of the files of all tenants, by when they expire (internal)
{prefix}:blob:{name}       hash, the contents of a file in chunks, and their `size` (internal)
{prefix}:batches:{tenant}  hash, by id when each batch of the tenant was made (internal)
{prefix}:batches           sorted set of unfinished batches, by when they were made (internal)
{prefix}:batch_progress    hash, by id the progress of unfinished batches: JSON (BatchProgress)
                           (internal)
{prefix}:batch:{id}        hash, a batch: its `state` (BatchState as JSON), the result of each
                           segment of its lines (`done:{number}`), and names of blobs that were
                           written for them (`piece:{name}`) (internal)
{prefix}:segment:{id}:{n}  the gateway that computes a segment, while it lives (internal)
{prefix}:attended          sorted set, until when each durable call is attached (internal)
{prefix}:policy            hash, the policy: `document` and its `version` (internal)

In a deployment of several models, each request moves from the requests stream to its model's own
stream. Keys of a lane exist per model:

{{prefix}:requests}:of:{model}     stream, the entries of {prefix}:requests for one model, with the
                                   same ids (internal)
{{prefix}:requests}:models         hash, by id: JSON (ModelRecord)
{{prefix}:requests}:closed         hash, by id the reason why a model accepts no requests (internal)
{prefix}:stages:{model}            as {prefix}:stages
{prefix}:service:{model}           as {prefix}:service (internal)
{prefix}:weight_update:{model}     as {prefix}:weight_update (internal)

The braces below are literal: a cluster keeps keys with the same tag in one slot, and a key without
a tag in the slot of a tag equal to the key.

{{prefix}:requests}:lanes  hash, each lane's lease expiry and keeper (internal)
{{prefix}:requests}:shards JSON (Layout), the number of shards
{{prefix}:requests}:begun  hash, each lane's number of begun requests, and its expiry (internal)
{{prefix}:requests}:queue_length  requests that have not begun; expires without a live lane
{{prefix}:limits}:window:{s}:{name} hash, each gateway's usage of a limit (internal)
{{prefix}:limits}:held:{name} hash, each gateway's holds on a limit, and their expiry (internal)
{{prefix}:images}:sizes    hash, by id the width and height of each stored image (internal)
{{prefix}:images}:data:{id} the image's pixels (internal); `part:` while they are written
{{prefix}:images}:leases   sorted set, by id and holder until when an image is held (internal)
{{prefix}:images}:holders  hash, by id the number of leases (internal)
{{prefix}:images}:free     sorted set, by id since when an image is not held (internal)
{{prefix}:images}:total    bytes of all images (internal)
{{prefix}:limits}:servers  hash, since when each server process has counted (internal)
{{prefix}:results}:told:{digest} marks an entry whose Completion is in the results stream (internal)
{{prefix}:link:{lane}}:{link} stream between two stages (internal): `w` the writer, `m` the message

Every script, transaction and multi-stream read names keys of one family only: the requests and
their leases; the results stream and its marks; the links of one lane; images; limits; every other
key alone.
"""

from __future__ import annotations

import hashlib

from ...config import MOST_SHARDS

JSON = b"json"
MSGPACK = b"msgpack"
REFUSED = b"refused"
TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
MODEL = b"model"
WRITER = b"w"
MESSAGE = b"m"


class Keys:
    """Key names under one prefix."""

    def __init__(self, prefix: str, lane: str = "0", model: str = "", shard: int = 0) -> None:
        """Args:
        prefix: Prefix of the deployment.
        lane: The lane whose links are named.
        model: One of the deployment's models; "" if it has only one.
        shard: The shard whose requests stream, and keys beside it, are named.
        """
        self._prefix = prefix
        self.shard = shard
        self.model = model
        # Unambiguous: a lane's name has no colon, and comes last.
        self._lane_prefix = f"{model}:" if model else ""
        self._lane = lane
        self.entrance = self._key(f"requests:{shard}" if shard else "requests")
        self.shards = beside(self._key("requests"), "shards")
        of_model = f":{model}" if model else ""
        self.requests = self.requests_of(model)
        self.models = beside(self.entrance, "models")
        self.closed = beside(self.entrance, "closed")
        self.results = self.results_of(shard)
        self.kv_events = self._key("kv_events")
        self.dead = self._key("dead")
        self.epoch = self._key("epoch")
        self.lanes = beside(self.entrance, f"lanes{of_model}")
        self.begun = beside(self.entrance, f"begun{of_model}")
        self.queue_length = beside(self.entrance, f"queue_length{of_model}")
        self.stages = self._key(f"stages{of_model}")
        self.service = self._key(f"service{of_model}")
        self.weights = self._key(f"weights:{self._lane_prefix}{lane}")
        self.weight_update = self._key(f"weight_update{of_model}")
        self.openings = self._key(f"openings:{self._lane_prefix}{lane}")
        self.adapters = self._key(f"adapters:{self._lane_prefix}{lane}")
        self.attended = self._key("attended")
        self.open_batches = self._key("batches")
        self.batch_progress = self._key("batch_progress")
        self.stored_of_all = self._key("stored")
        self.trees_of_all = self._key("trees")
        self._limits = self._key("limits")
        self.limits_servers = beside(self._limits, "servers")
        self.policy = self._key("policy")
        self.history = self._key("history")
        self.images = self._key("images")

    def of_shard(self, shard: int) -> Keys:
        """Return the keys of another shard."""
        return Keys(self._prefix, self._lane, self.model, shard)

    def results_of(self, shard: int) -> bytes:
        """Return a shard's results stream."""
        return self._key(f"results:{shard}" if shard else "results")

    def requests_of(self, model: str) -> bytes:
        """Return a model's requests stream; all share one slot of a cluster."""
        return beside(self.entrance, f"of:{model}") if model else self.entrance

    def out(self, key: str) -> bytes:
        """Return a request's output stream. Any text is a valid key, even with a lone surrogate."""
        return self._key(f"out:{key}")

    def own(self, key: str) -> bytes:
        """Return the key that holds the owner of a request id."""
        return self._key(f"own:{key}")

    def fork(self, entry: str) -> bytes:
        """Return the key that holds the prompt of a fork, by the key of its entry."""
        return self._key(f"fork:{entry}")

    def told(self, key: str, entry_id: str) -> bytes:
        """Return the mark of an entry whose terminal message is in the results stream.

        Args:
            key: Key of the stream that the message ends.
        """
        text = f"{len(key)}:{key}{entry_id}".encode("utf-8", "surrogatepass")
        results = self.results_of(split_entry(entry_id)[1])
        return beside(results, f"told:{hashlib.sha1(text).hexdigest()}")

    def link(self, name: str, lane: str | None = None) -> bytes:
        """Return a link's stream, of this lane or another."""
        lane = self._lane if lane is None else lane
        return beside(self._key(f"link:{self._lane_prefix}{lane}"), name)

    def reply(self, operation_id: str) -> bytes:
        return self._key(f"reply:{operation_id}")

    def call(self, call_id: str) -> bytes:
        return self._key(f"call:{call_id}")

    def name(self, name: str) -> bytes:
        return self._key(f"name:{name}")

    def stored(self, tenant: str) -> bytes:
        """Return the sizes of a tenant's durable calls."""
        return self._key(f"stored:{tenant}")

    def tree(self, tenant: str, session: str) -> bytes:
        """Return a session's token tree. Models have token ids, and so trees, of their own."""
        text = "".join(f"{len(part)}:{part}" for part in (self.model, tenant, session))
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self._key(f"tree:{digest}")

    def trees(self, tenant: str) -> bytes:
        """Return the sizes of a tenant's token trees."""
        return self._key(f"trees:{tenant}")

    def files(self, tenant: str) -> bytes:
        """Return the files of a tenant."""
        return self._key(f"files:{tenant}")

    @property
    def file_expiries(self) -> bytes:
        """Return the files of all tenants by when they expire."""
        return self._key("file_expiries")

    def blob(self, name: str) -> bytes:
        """Return the contents of a file."""
        return self._key(f"blob:{name}")

    def batches(self, tenant: str) -> bytes:
        """Return the batches of a tenant."""
        return self._key(f"batches:{tenant}")

    def batch(self, batch_id: str) -> bytes:
        return self._key(f"batch:{batch_id}")

    def segment(self, batch_id: str, number: int) -> bytes:
        """Return the lease of a segment of a batch."""
        return self._key(f"segment:{batch_id}:{number}")

    def limit(self, name: str, window_s: int) -> bytes:
        """Return the usage of a limit; another window has a key of its own. 0: concurrency."""
        return beside(self._limits, f"window:{window_s}:{name}" if window_s else f"held:{name}")

    def wake(self, name: str) -> bytes:
        return self._key(f"wake:{name}")

    def _key(self, rest: str) -> bytes:
        return f"{self._prefix}:{rest}".encode("utf-8", "surrogatepass")


def beside(key: bytes, name: str) -> bytes:
    """Return another key in the same hash slot. `key` has no braces."""
    return b"{%s}:%s" % (key, name.encode("utf-8", "surrogatepass"))


def entry_name(raw: str, shard: int) -> str:
    """Return an entry's id: its id on the stream, and after a hyphen its shard if not 0."""
    return f"{raw}-{shard}" if shard else raw


def split_entry(entry_id: str) -> tuple[str, int]:
    """Return an entry's id on its stream, and the shard."""
    raw, hyphen, shard = entry_id.rpartition("-")
    if hyphen and "-" in raw and shard.isascii() and shard.isdigit() and len(shard) <= 3:
        return raw, min(int(shard), MOST_SHARDS - 1)
    return entry_id, 0


def parse_id(raw: bytes) -> tuple[int, int]:
    """Return an entry id as integers, which compare in stream order."""
    milliseconds, _, number = raw.partition(b"-")
    return int(milliseconds), int(number)


def id_after(raw: bytes) -> str:
    """Return the smallest id above this one."""
    milliseconds, number = parse_id(raw)
    return f"{milliseconds}-{number + 1}"
