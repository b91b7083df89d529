"""The stories that find the planted defects."""

from __future__ import annotations

from .hunting import Known

EVERY_DAY = (
    "a stage that starts begins no epoch",
    "the first token of a prompt is taken for computed",
    "a dispatched sequence costs no credit",
)
"""Defects that `make test` plants."""

FOUND: dict[str, Known] = {
    "streaming is asked about no request": (1, 10),
    "a stage that starts begins no epoch": (0, 10),
    "an answered entry is not acknowledged": (0, 10),
    "a resumed sample begins anew": (3, 10),
    "messages of older epochs are handled": (42, 24),
    "a new epoch drops no state": (1, 10),
    "the executor keeps the sequences of the last epoch": (3, 10),
    "results are sent twice": (3, 10),
    "a sample's chunks are restored without their tokens": (13, 10),
    "a dispatched sequence costs no credit": (0, 10),
    "a cancelled request stays in the queue": (11, 10),
    "reports give no credits back": (0, 24),
    "cancellations are not passed on": (0, 24),
    "the first token of a prompt is taken for computed": (0, 24),
    "a block is shared that is not copied": (0, 24),
    "KV of older weights is found": (3, 10),
    "the cache of another executor is kept": (1, 10),
    "plans in flight are kept over an epoch": (7, 10),
    "a sequence is handed over without its first token": (3, 10),
    "a sequence that ends with its first token in flight is withdrawn at once": (60, 24),
    "a first token does not wait for its sequence": (140, 24),
    "a sequence that ends where it began is not withdrawn": (18, 10),
    "a place that was promised is not freed": (18, 10),
    "a promised place is free for others, too": (3, 10),
    "blocks of other weights are found in the tiers": (201, 10),
    "a fetch that fails counts as whole": (21, 24),
    "KV of an adapter's older weights is found": (199, 10),
    "drafts have no blocks of their own": (1, 10),
    "drafts in flight are not reckoned with": (8, 10),
    "a sequence that resumes costs no credit": (55, 10),
    "a terminal message is sent twice": (0, 10),
    "whoever waits for a queue is not woken": (1, 10),
    "a follower in memory does not notice outputs": (1, 10),
    "chunks have no number in their stream": (0, 10),
    "chunks that a server gets again are given to clients again": (33, 10),
    "a repeated message is handled again": (41, 10),
    "epochs begin anew when the server has lost their number": (25, 10),
    "entries in memory are forgotten when admission fails": (39, 24),
    "the tenant that was served most goes first": "tenants",
    "an older epoch writes to a recovered stream": "recovered",
    "an older record of a lane makes a predecessor its keeper": (12, 10),
    "a lane fails at its start when a connection breaks": (222, 10),
    "a stage of which a successor has started takes part in the successor's epoch": (69, 24),
    "a paused sequence takes another place where it continues": "paused",
    "a request that fails its lane is never given up": (3, 24),
    "a replica whose host has vanished is waited for": (642, 24),
    "blocks of adapters are audited": (741, 24),
}
