"""The gateway's settings."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from .base import Section


class GatewayConfig(Section, frozen=True, forbid_unknown_fields=True):
    """The HTTP server in front of the bus.

    Attributes:
        port: Where it listens; 0 is off, and `nano-inference gateway` then takes 30000.
        grpc_port: Where gRPC listens (KServe V2, docs/kserve.md), as Triton's 8001; null is off.
        host: The address on which these ports listen. On any but this machine's own (loopback) it
            takes keys (`policy.backend`), or `insecure`.
        insecure: Whether it listens on other addresses without keys, where whoever reaches it may
            replace the weights.
        tls_certificate: The file of its certificate and those behind it, in PEM; "" for no TLS.
            When the file changes, new connections have the new one.
        tls_key: The file of the certificate's key.
        tls_client_ca: A file of certificates: only clients with one signed by these may connect.
        max_connections: More clients than that with a request under way are told to come again
            later, with status 429; fewer where the limit of open files allows no more.
        max_body_bytes: A larger request is refused with status 413.
        max_weights_bytes: The same for the one call that carries tensors in its body.
        max_bodies_bytes: The bodies of all requests under way may hold so much beyond the first
            64 KiB of each; what comes beyond it is told to come again later, with status 429.
        head_timeout_s: How long the head of a request may take to arrive, from the connection's
            beginning or, on one that has had requests, from the head's first byte.
        keep_alive_s: How long a connection may wait for its next request.
        body_timeout_s: So often a body must have brought on as much as `min_body_bytes_per_s` asks
            for, however long it takes altogether; else it ends with status 408. It is 1 second
            while others are refused for want of room.
        min_body_bytes_per_s: The least speed of a body.
        send_timeout_s: A client that takes no byte of its answer for so long is closed.
        resume_grace_s: How long a call goes on without its client, where that has shown that it may
            come back: it sent an `Idempotency-Key`, or has come back before (`Last-Event-ID`). Any
            other ends at once when its connection closes. So long it also goes on when its gateway
            was stopped or killed, whoever made it. 0: all end at once, and nobody looks for those
            of a gateway that was killed. Responses in the background end by none of that; another
            gateway goes on with one whose own is gone for so long, or for some seconds where this
            is 0.
        event_ids: Whether the events of OpenAI's streams have ids, behind which a client can go on.
            Some programs take each event for a line that begins with "data: ", as `vllm bench
            serve`, and stumble over them.
        comment_s: A stream that has nothing to send for so long sends a comment, so that nobody on
            the way closes it.
        message_format: How the model writes its messages: reasoning, text, calls of tools. "auto":
            as its tokenizer or its chat template shows; "off": all is text; else the name of a
            format (docs/tools.md), or a file with one.
        reasoning_field: What OpenAI's chats call the reasoning in an answer: `reasoning_content`,
            as SGLang and Transformers, or `reasoning`, as vLLM. Both are read in messages.
        template_timeout_s: How long the model's chat template may take for one conversation.
        allowed_hosts: Names under which the gateway may be called, besides any address,
            "localhost", `host` and the name of its machine; without a port.
        allowed_origins: Origins ("https://example.org") whose web pages may call the gateway.
            Without keys, whoever writes those pages may then replace the weights.
        access_log: Whether each call has a line in the log: method, route, status, duration, bytes,
            name, tenant and tokens, and no text of a request or an answer.
        shared_memory: Whether clients on this machine may name shared memory that tensors are read
            from and written to. Whoever may call models may then read and write every POSIX shared
            memory object that this process may.
        max_tensor_bytes: The tensors of one request that are in shared memory may hold so much,
            those read and those written together. As much is kept to read into again; and all
            requests under way may have read as much as `max_bodies_bytes`, or one's tensors.
        models: Names under which packages have registered models of their own
            (`nano_inference.kserve_models`, docs/kserve-models.md) that KServe is to serve as well.
            Their code runs in the gateway.
        effects_by_get: Which calls with effects are taken by GET as well, from programs that do not
            call themselves a browser: "none"; "flush_cache", as trainers call it; "all", with
            those that release and resume memory.
        sync_timeout_s: How long a part of a weight update may take to arrive. A call about weights
            waits for others half a minute longer, and is then refused as `weights_busy`.
        health_timeout_s: How long `/health_generate` waits for its one token.
        max_prompts: Most prompts of one call, each counted as often as it is sampled.
        max_in_flight: Requests of this gateway in the pipeline; more wait here, and tenants take
            turns. None is, for each lane, three quarters of `admission.max_in_flight`, at least two
            full batches. One tenant alone has half of them.
        max_waiting: Requests that may wait here; beyond that the newest call of the tenant that
            has most is refused as "overloaded".
        max_priority: A request that asks for a higher priority is refused, unless the caller's key
            allows it, so that nobody goes before others because he says so.
        metrics: Whether `GET /metrics` shows the metrics of this process, without
            `telemetry.metrics_port` too. Where there are keys, it takes one with the scope "read".
    """

    SECTION: ClassVar[str] = "gateway"

    port: int = 0
    grpc_port: int | None = None
    host: str = "127.0.0.1"
    insecure: bool = False
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    max_connections: int = 4096
    max_body_bytes: int = 16 << 20
    max_weights_bytes: int = 256 << 20
    max_bodies_bytes: int = 512 << 20
    head_timeout_s: float = 15.0
    keep_alive_s: float = 60.0
    body_timeout_s: float = 15.0
    min_body_bytes_per_s: int = 4096
    send_timeout_s: float = 60.0
    resume_grace_s: float = 30.0
    event_ids: bool = True
    comment_s: float = 15.0
    message_format: str = "auto"
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    template_timeout_s: float = 5.0
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = False
    shared_memory: bool = False
    max_tensor_bytes: int = 256 << 20
    models: tuple[str, ...] = ()
    effects_by_get: Literal["none", "flush_cache", "all"] = "flush_cache"
    sync_timeout_s: float = 300.0
    health_timeout_s: float = 20.0
    max_prompts: int = 8192
    max_in_flight: int | None = None
    max_waiting: int = 16_384
    max_priority: int = 0
    metrics: bool = True

    @property
    def listens(self) -> bool:
        """Whether there is to be a gateway beside a pipeline that is begun."""
        return bool(self.port) or self.grpc_port is not None

    def check(self) -> None:
        self.require("port", 0 <= self.port <= 65_535, "a port, or 0")
        grpc = self.grpc_port is None or 0 <= self.grpc_port <= 65_535
        self.require("grpc_port", grpc, "a port, 0 for a free one, or null")
        self.require("host", bool(self.host), "an address of this machine")
        for name in ("tls_certificate", "tls_key"):
            both = bool(self.tls_certificate) == bool(self.tls_key)
            self.require(name, both, "set where its other half is: certificate and key")
        if self.tls_client_ca:
            tls = bool(self.tls_certificate)
            self.require("tls_client_ca", tls, "empty without gateway.tls_certificate")
        for name in (
            "max_connections",
            "max_body_bytes",
            "max_weights_bytes",
            "max_tensor_bytes",
            "max_prompts",
        ):
            self.require(name, getattr(self, name) >= 1, "at least 1")
        self.require(
            "max_bodies_bytes",
            self.max_bodies_bytes >= max(self.max_body_bytes, self.max_weights_bytes),
            "at least gateway.max_body_bytes and gateway.max_weights_bytes, or a body of that size "
            "could never be taken",
        )
        self.require("min_body_bytes_per_s", self.min_body_bytes_per_s >= 0, "at least 0")
        for name in self.__struct_fields__:
            if name.endswith(("timeout_s", "alive_s", "comment_s")):
                value = getattr(self, name)
                self.require(name, 0 < value <= 86_400, "above 0, at most 86400 (a day)")
        grace_s = self.resume_grace_s
        self.require("resume_grace_s", 0 <= grace_s <= 86_400, "from 0 to 86400 (a day)")
        self.require(
            "allowed_hosts",
            all(name and not set(name) & set("/: *") for name in self.allowed_hosts),
            "names of hosts, without scheme and port",
        )
        self.require(
            "allowed_origins",
            all(re.fullmatch(r"https?://[^/*\s]+", origin) for origin in self.allowed_origins),
            "origins such as https://example.org, without a path",
        )
        self.require("message_format", bool(self.message_format), "auto, off, a name or a file")
        self.require("max_waiting", self.max_waiting >= 1, "at least 1")
        # One tenant may have half of the places.
        enough = self.max_in_flight is None or self.max_in_flight >= 2
        self.require("max_in_flight", enough, "at least 2, or null")
