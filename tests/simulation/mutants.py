"""Defects that the simulation must find."""

from __future__ import annotations

from .planting import Defect

_EPOCHS = "stages/admission/epochs.py"
_REQUESTS = "stages/admission/requests.py"
_ADMISSION = "stages/admission/stage.py"
_ACTOR = "stages/actor.py"
_STREAMING = "stages/streaming/core.py"
_BATCHING = "stages/batching/core.py"
_FAIRNESS = "stages/fairness/core.py"
_HANDOVERS = "stages/batching/parts/handover/departures.py"
_SEQUENCE = "stages/batching/sequence.py"
_SNAPSHOTS = "stages/batching/parts/snapshots/part.py"
_TIERS = "stages/batching/parts/tiers/tiers.py"
_LEASES = "bus/redis/leases.py"
_RESULTS = "bus/redis/results.py"
_CALLS = "gateway/serving/durable_calls.py"

MUTANTS = (
    # --- admission
    Defect(
        "streaming is asked about no request", _EPOCHS, "self._ask(self._ledger)", "self._ask([])"
    ),
    Defect(
        "a stage that starts begins no epoch",
        _EPOCHS,
        'self._begin(f"{role} started", now_ns)',
        "pass",
    ),
    Defect(
        "an answered entry is not acknowledged",
        "stages/admission/requests.py",
        "self._outbox.add(do.Acknowledge(entry_id, request_id))",
        "pass",
    ),
    Defect(
        "a resumed sample begins anew",
        "stages/admission/core.py",
        "tokens.get(index, ())",
        "()",
    ),
    Defect(
        "a death is counted without suspicion",
        _REQUESTS,
        "item.deaths += item.suspected",
        "item.deaths += 1",
    ),
    Defect(
        "a dead letter is added twice",
        _REQUESTS,
        "        self._outbox.add(do.AddDeadLetter(item.entry, item.trace, error, item.deaths))\n",
        "        letter = do.AddDeadLetter(item.entry, item.trace, error, item.deaths)\n"
        "        self._outbox.add(letter, letter)\n",
    ),
    Defect(
        "a dead letter is lost",
        _ADMISSION,
        "await self.bus.requests.add_dead_letter(entry, error, effect.deaths)",
        "pass",
    ),
    Defect(
        "a cancellation of an entry that is not in the ledger is lost",
        _REQUESTS,
        "        self.incoming.cancel(key, cancel)\n",
        "        pass\n",
    ),
    Defect(
        "inherited entries have no timer",
        _REQUESTS,
        "deadlines = [entry_deadline_ns(*each) for each in self.inherited]",
        "deadlines = []",
    ),
    Defect(
        "leases are taken over after a tenth of their time",
        _ADMISSION,
        "self.bus.requests.take_over(lease_s, room)",
        "self.bus.requests.take_over(lease_s / 10, room)",
    ),
    Defect(
        "leases are renewed after twice their time",
        _ADMISSION,
        "third_ns = int(self.config.admission.lease_s / 3 * 1e9)",
        "third_ns = int(self.config.admission.lease_s * 2 * 1e9)",
    ),
    # --- stages
    Defect(
        "messages of older epochs are handled",
        _ACTOR,
        "if envelope.epoch < self.epoch:",
        "if envelope.epoch < 0:",
    ),
    Defect(
        "a new epoch drops no state",
        _ACTOR,
        "self.epoch = envelope.epoch\n                await self.reset()",
        "self.epoch = envelope.epoch",
    ),
    Defect(
        "an executor that starts without admission takes plans of its predecessor",
        "stages/executor/stage.py",
        "if not self.in_epoch:",
        "if False:",
    ),
    Defect(
        "the executor keeps the sequences of the last epoch",
        "stages/executor/stage.py",
        "_TORCH_THREAD.submit(self._core.reset)",
        "pass",
    ),
    Defect(
        "results are sent twice",
        "stages/executor/stage.py",
        "            self._weight_version = result.weight_version\n            await self._changes",
        "            await self.send(self.own(STEPS_STREAMING), result, epoch=epoch)\n"
        "            await self._changes",
    ),
    # --- streaming
    Defect(
        "a sample's chunks are restored without their tokens",
        _STREAMING,
        "            sample.restore(chunk)\n",
        "            pass\n",
    ),
    # --- fairness
    Defect(
        "a dispatched sequence costs no credit",
        "stages/fairness/core.py",
        "replica.credits -= number",
        "replica.credits -= 0",
    ),
    Defect(
        "a cancelled request stays in the queue",
        "stages/fairness/core.py",
        "            self.queue.drop(waiting)\n        return msgspec",
        "            pass\n        return msgspec",
    ),
    Defect(
        "reports give no credits back",
        "stages/fairness/core.py",
        "reporter.credits += report.sequences",
        "reporter.credits += 0",
    ),
    # --- batching
    Defect(
        "cancellations are not passed on",
        "stages/batching/plans.py",
        "ended=tuple(self.ended),",
        "ended=(),",
    ),
    Defect(
        "the first token of a prompt is taken for computed",
        "stages/batching/sequence.py",
        "self.num_cached = self.num_computed = self.num_scheduled = num_cached",
        "self.num_cached = self.num_computed = self.num_scheduled = num_cached or 1",
    ),
    Defect(
        "a block is shared that is not copied", _BATCHING, "draft.copies += blocks.copies", "pass"
    ),
    Defect(
        "KV of older weights is found",
        "stages/batching/cache.py",
        "        self.weight_version = version\n        self.flush(new_weights=True)\n",
        "        self.weight_version = version\n",
    ),
    Defect(
        "the cache of another executor is kept",
        "stages/batching/stage.py",
        "keeps_cache = executor == ready.incarnation",
        "keeps_cache = True",
    ),
    Defect(
        "plans in flight are kept over an epoch",
        _BATCHING,
        "        self.sent.clear()\n        for seq in list(self._leaving.values()):",
        "        for seq in list(self._leaving.values()):",
    ),
    # --- handovers
    Defect(
        "a sequence is handed over without its first token",
        "stages/batching/parts/handover/arrivals.py",
        "generated=(*spec.generated, *handover.token_ids)",
        "generated=spec.generated",
    ),
    Defect(
        "a sequence that ends with its first token in flight is withdrawn at once",
        _HANDOVERS,
        "        if not seq.hands_over or seq.seq_id in self._sampling:",
        "        if not seq.hands_over:",
    ),
    Defect(
        "a first token does not wait for its sequence",
        "stages/batching/parts/handover/arrivals.py",
        "arrival and handover and arrival.num_messages == handover.num_messages",
        "arrival and handover",
    ),
    Defect(
        "a sequence that ends where it began is not withdrawn",
        _HANDOVERS,
        "            self._send(leaver, WithdrawSequences((seq.seq_id,)))",
        "            pass",
    ),
    Defect(
        "a place that was promised is not freed",
        "stages/fairness/parts/handovers.py",
        "            successor.credits += 1",
        "            pass",
    ),
    Defect(
        "a promised place is free for others, too",
        "stages/fairness/parts/handovers.py",
        "        successor.credits -= 1\n",
        "",
    ),
    # --- KV tiers
    Defect(
        "blocks of other weights are found in the tiers",
        _TIERS,
        'origin = f"{self.capacity.incarnation}.{weight_version}"',
        "origin = self.capacity.weights",
    ),
    Defect(
        "a fetch that fails counts as whole",
        _TIERS,
        "        for name in changes.lost:\n            self._counts.lost += 1\n",
        "        for name in changes.lost:\n            self._counts.lost += 1\n"
        "            self._end_fetch(name, whole=True)\n",
    ),
    # --- recurrent state
    Defect(
        "a snapshot is made a token late",
        _SNAPSHOTS,
        "StateSave(each.seq.seq_id, each.num_tokens, each.number)",
        "StateSave(each.seq.seq_id, min(each.num_tokens + 1, each.seq.num_scheduled), each.number)",
    ),
    Defect(
        "a snapshot's number is given out twice",
        "stages/batching/parts/snapshots/pool.py",
        "number = self._free.pop()",
        "number = self._free[-1]",
    ),
    Defect(
        "a snapshot is found before its step is back",
        _SNAPSHOTS,
        "            self._in_flight[draft.step_id] = saves\n",
        "            for save in saves:\n                self._keep(save)\n",
    ),
    # --- adapters and speculation
    Defect(
        "KV of an adapter's older weights is found",
        "stages/batching/parts/adapters.py",
        "_replace(adapter=id, adapter_version=version)",
        "_replace(adapter=id, adapter_version=0)",
    ),
    Defect(
        "drafts have no blocks of their own",
        "stages/batching/parts/speculation.py",
        "            if lacking:\n                num_blocks[seq.seq_id] ="
        " num_blocks.get(seq.seq_id, 0) + lacking\n",
        "",
    ),
    Defect(
        "drafts in flight are not reckoned with",
        _SEQUENCE,
        "self.num_drafting -= num_drafts",
        "self.num_drafting = 0",
    ),
    # --- time slices
    Defect(
        "a sequence that resumes costs no credit",
        _FAIRNESS,
        "            self.run(replica, waiting.paused, level, rank)\n",
        "            self.run(replica, waiting.paused, level, rank)\n"
        "            replica.credits += 1\n",
    ),
    # --- the bus
    Defect(
        "a terminal message is sent twice",
        "bus/redis/result_scripts.py",
        "if redis.call('EXISTS', told) == 1 then return 0 end",
        "if false then return 0 end",
    ),
    Defect(
        "a reader that waits for a queue is not woken",
        "bus/queue.py",
        "        self._items.append((producer, item))\n        if self._takers:",
        "        self._items.append((producer, item))\n        if False:",
    ),
    Defect(
        "a follower in memory does not notice outputs",
        "bus/memory/results.py",
        "            self._end(route, output)\n        route.changed.notify()",
        "            self._end(route, output)",
    ),
    Defect(
        "chunks have no number in their stream",
        _RESULTS,
        'f"{epoch}-{number}", JSON, part.payloads[0]]',
        '"*", JSON, part.payloads[0]]',
    ),
    Defect(
        "chunks that a server gets again are given to clients again",
        "bus/redis/given.py",
        "if offset == given:",
        "if offset <= given:",
    ),
    Defect(
        "a repeated message is handled again",
        "bus/redis/links.py",
        "if envelope.id <= self._last.get(source, 0):",
        "if False:",
    ),
    Defect(
        "epochs begin anew when the server has lost their number",
        "bus/redis/bus.py",
        "math.max(tonumber(redis.call('GET', KEYS[1]) or 0) + 1, now_ms)",
        "tonumber(redis.call('GET', KEYS[1]) or 0) + 1",
    ),
    Defect(
        "entries in memory are forgotten when admission fails",
        "bus/memory/bus.py",
        "return [_aged(*item) for item in self._taken.values()]",
        "return []",
    ),
    Defect(
        "the tenant that was served most goes first",
        "stages/fairness/queue.py",
        "        return self.counter\n",
        "        return -self.counter\n",
    ),
    Defect(
        "an older epoch writes to a recovered stream",
        "bus/redis/result_scripts.py",
        "local reply = redis.pcall('XADD', KEYS[1], fence, 'fence', '')",
        "local reply = redis.pcall('XADD', KEYS[1] .. 'x', fence, 'fence', '')",
    ),
    # --- gateways
    Defect(
        "a key that another call has runs its call again",
        _CALLS,
        "            await self._calls.drop(record.id)\n        return owner\n",
        "            pass\n        return record.id\n",
    ),
    Defect(
        "a resumed stream begins anew",
        "gateway/api/openai/answers.py",
        "self._sent_before = self._passed = max(0, after)",
        "self._sent_before = self._passed = 0",
    ),
    Defect(
        "a gateway does not renew its attachments",
        _CALLS,
        "            await self._calls.attach(each, self._attached_s(background))\n"
        "        await self._calls.detach(ended)",
        "            pass\n        await self._calls.detach(ended)",
    ),
    # --- constraints
    Defect(
        "a constraint does not reach the executor",
        "stages/admission/sampling.py",
        "constraint = plain(constraint)",
        "constraint = None",
    ),
    Defect(
        "a line that another gateway takes over has a new key",
        "gateway/batches/runner.py",
        'b"idempotency-key", name.encode()',
        'b"idempotency-key", uuid.uuid4().hex.encode()',
    ),
    Defect(
        "the blobs of the result that counts are deleted",
        "gateway/batches/runner.py",
        "if not await self._patiently(finish):",
        "if await self._patiently(finish):",
    ),
    Defect(
        "a segment whose gateway was killed is not taken over",
        "store/batches.py",
        '"NX", "GET", "EX", lease_s)',
        '"NX", "GET", "EX", 10**6 * lease_s)',
    ),
    Defect(
        "the last recorded result of a segment counts",
        "store/batches.py",
        '("HSETNX", key, field, raw),',
        '("HSET", key, field, raw),',
    ),
    Defect(
        "an aborted line is answered",
        "gateway/batches/runner.py",
        "if call.aborted or call.code == _LOST:",
        "if False:",
    ),
    Defect(
        "background sequences pause before they are handed over",
        "stages/fairness/parts/background.py",
        'and running.successor in ("", running.replica)',
        "and True",
    ),
)

OLD_DEFECTS = (
    Defect(
        "an older record of a lane makes a predecessor its keeper",
        _LEASES,
        "if other and other ~= keeper and number_of(other) >= number_of(keeper) then",
        "if other and other ~= keeper then",
    ),
    Defect(
        "a lane fails at its start when a connection breaks",
        "bus/redis/requests.py",
        "await self.record.read(waits=True)",
        "await self.record.read()",
    ),
    Defect(
        "a stage of which a successor has started takes part in the successor's epoch",
        _ACTOR,
        "if not await self.bus.is_newest(self.role):",
        "if False:",
    ),
    Defect(
        "a paused sequence takes another place where it continues",
        _FAIRNESS,
        "        if waiting.paused is None:\n            for hook in self._parts.limit:",
        "        if True:\n            for hook in self._parts.limit:",
    ),
    Defect(
        "a request that fails its lane is never given up",
        "stages/admission/requests.py",
        "if item.deaths >= self._max_lane_deaths:",
        "if False:",
    ),
    Defect(
        "a replica whose host has vanished is waited for",
        "stages/admission/vanished.py",
        "            if misses >= _MOST_MISSES\n",
        "            if False\n",
    ),
    Defect(
        "blocks of adapters are audited",
        "stages/batching/parts/tiers/audit.py",
        "if block.scope.adapter or max(block.token_ids) > MAX_TOKEN_ID:",
        "if max(block.token_ids) > MAX_TOKEN_ID:",
    ),
    Defect(
        "two requests under one entry id are one",
        "bus/entry_keys.py",
        'return f"{entry_id} {request_id}"',
        "return entry_id",
    ),
    Defect(
        "a call that never got its key is taken over",
        _CALLS,
        "if not stored.entries and not await self._has_its_name(call_id, stored):",
        "if False:",
    ),
    Defect(
        "what was delivered is not compared with the stream",
        _STREAMING,
        "return not request.info.stream or Counter(known) == delivered",
        "return True",
    ),
    Defect(
        "a request that is lost once it has begun is followed for ever",
        "bus/redis/follow.py",
        "begun_counts = silent + 1 < LOST_CHECKS",
        "begun_counts = True",
    ),
    Defect(
        "tokens after a lost step are delivered in its place",
        "stages/streaming/stage.py",
        "if result.step_id == last + 1 and last >= 0:",
        "if True:",
    ),
    Defect(
        "a begun request that runs anew repeats its tokens",
        _STREAMING,
        "if sample and request.unasked and started.num_generated < len(sample.token_ids):",
        "if False:",
    ),
    Defect(
        "a sequence computes blocks that it loads, since another start has just stored them",
        _BATCHING,
        "if num_tokens[seq_id] > seq.num_remaining:",
        "if False:",
    ),
    Defect(
        "a pause that is called off has no answer",
        "stages/batching/stage.py",
        "await self._answer_pause()  # its wait for the last step is over",
        "pass",
    ),
    Defect(
        "a stage that fails in a replaced process ends its successor",
        "bus/redis/starts.py",
        "if not self._number:",
        "if True:",
    ),
    Defect(
        "a server that changes while admission stands still is not noticed",
        "bus/redis/links.py",
        'while this process stood still."""\n        self._compare = True',
        'while this process stood still."""',
    ),
    Defect(
        "a stream is ended of which a server has lost the first entries",
        "bus/redis/result_scripts.py",
        "redis.pcall('XSETID', KEYS[1], fence, 'ENTRIESADDED', added)",
        "",
    ),
)
"""Recovery defects that CHANGELOG knows, with the mend undone."""
