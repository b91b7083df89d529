"""The gateway's settings."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from .base import NonNegativeInt, Port, PositiveInt, Range, Seconds, Section


class GatewayConfig(Section, frozen=True, forbid_unknown_fields=True):
    """The HTTP and gRPC servers in front of the bus.

    Attributes:
        port: HTTP port; 0 is off (`nano-inference gateway` then uses 8000).
        grpc_port: gRPC port (KServe V2, docs/kserve.md), as Triton's 8001; null is off.
        host: Address of these ports. Any address but loopback requires keys (`policy.backend`) or
            `insecure`.
        insecure: Whether other addresses are allowed without keys; any caller may then replace the
            weights.
        tls_certificate: PEM file of the certificate chain; "" for no TLS. Reloaded when it changes.
        tls_key: File of the certificate's key.
        tls_client_ca: File of CA certificates; only clients with a certificate signed by one may
            connect.
        max_connections: Limit on clients with a request in flight; more get status 429. Lower if
            the limit on open files requires it.
        max_body_bytes: Size limit of a request body; larger ones get status 413.
        max_weights_bytes: The same for the one call with tensors in its body.
        max_bodies_bytes: Memory limit of all request bodies in flight, beyond the first 64 KiB of
            each; more get status 429.
        head_timeout_s: Time limit for a request's head, from the connection's beginning or, on a
            reused connection, from the head's first byte.
        keep_alive_s: Time limit for an idle connection.
        body_timeout_s: Interval in which a body must keep up `min_body_bytes_per_s`, however long
            it takes in all; else status 408. It is 1 second while others are refused for lack of
            memory.
        min_body_bytes_per_s: Lowest speed of a body.
        send_timeout_s: A client that reads nothing of its answer for so long is disconnected.
        resume_grace_s: Seconds that a call continues without its client, if the client can come
            back: it sent an `Idempotency-Key`, or resumed before (`Last-Event-ID`). Other calls end
            when their connection closes. Every call continues so long after its gateway was stopped
            or killed. 0: all end at once, and calls of a killed gateway are not taken over.
            Background responses are exempt: another gateway takes over after this time, or after
            some seconds if it is 0.
        event_ids: Whether events of OpenAI's streams have ids, after which a client can resume.
            Some programs, such as `vllm bench serve`, fail on lines that don't begin with "data: ":
            with "auto" chunks have ids only for a client that accepts `text/event-stream` by name,
            or sends `Idempotency-Key` or `Last-Event-ID`. Events of stored responses have them.
        comment_s: Interval of comments on a silent stream, which keep proxies from closing it.
        message_format: Format of the model's messages: reasoning, text, tool calls. "auto": by its
            tokenizer or chat template; "off": plain text; else a format's name (docs/tools.md), or
            a file with one.
        reasoning_field: Name of the reasoning in OpenAI chat answers: `reasoning_content` (SGLang,
            Transformers) or `reasoning` (vLLM). Both are accepted in messages.
        unknown_fields: Whether a field of a body that nothing here reads, by any name, is an error
            ("refuse") or left out ("ignore"). Within messages, tools and metadata it is always left
            out. The header `X-Ignored-Fields` names what was left out (docs/compatibility.md).
        billing_lines: Whether a conversation's first lines are left out ("drop") or shown to the
            model ("keep") if they are for Anthropic's billing (`x-anthropic-billing-header: …`,
            from Claude Code). They change from call to call, and nothing after them would be found
            in the prefix cache.
        continue_by_tokens: Whether the prompt of a session's next turn is made of its token tree's
            tokens, and of what the chat template writes after the last answer
            (docs/token-tree.md). A call's header `X-Continue-By-Tokens` counts before it.
        model_aliases: Names of models, and the names under which they are served. One `*` in a
            name stands for any text: `{"claude-*": "tiny"}`. A model's own name counts first, then
            the alias without `*`, then that with most other characters.
        adapter_folder: Folder whose subfolders are LoRA adapters, in PEFT's format. A call that
            names one in `model` has it loaded (docs/adapters.md); executors read the same path.
            "": only loaded adapters can be named.
        chat_template_in_requests: Whether a call may bring its own chat template
            (`chat_template`). A template is a program: it runs in a process of its own, within
            Jinja's sandbox and `template_timeout_s`.
        template_timeout_s: CPU time limit of the chat template for one conversation.
        allowed_hosts: Host names of the gateway, without a port, besides addresses, "localhost",
            `host` and the machine's name.
        allowed_origins: Origins ("https://example.org") whose web pages may call the gateway.
            Without keys, those pages may replace the weights.
        access_log: Whether each call is logged: method, route, status, duration, bytes, name,
            tenant and tokens, but no text.
        shared_memory: Whether clients on this machine may name shared memory for tensors. Callers
            may then read and write every POSIX shared memory object that this process may.
        max_tensor_bytes: Size limit of one request's tensors in shared memory, inputs and outputs
            together. A buffer of that size is reused; all requests in flight may have read as much
            as `max_bodies_bytes`, or one request's tensors.
        models: Names of models registered by packages (`nano_inference.kserve_models`,
            docs/kserve-models.md) for KServe to serve. Their code runs in the gateway.
        effects_by_get: Calls with effects that are accepted by GET from non-browsers: "none";
            "flush_cache", as trainers call it; "all", which adds releasing and resuming memory.
        sync_timeout_s: Time limit for one part of a weight update. Other weight calls wait half a
            minute longer, and are then refused as `weights_busy`.
        return_sampling_mask: Whether `/inference/v1/generate` returns the sampling masks of every
            call with top_k, top_p or min_p: for clients of vLLM, where it is a setting of the
            server. Elsewhere a call's own `return_sampling_mask` decides.
        health_timeout_s: Time limit of `/health_generate` for its one token.
        max_prompts: Limit on prompts of one call, times their samples.
        max_in_flight: Requests of this gateway in the pipeline; more wait here, and tenants take
            turns. Default (None), per lane: three quarters of `admission.max_in_flight`, at least
            two full batches. One tenant alone may use half.
        max_waiting: Requests that may wait here; beyond that, the newest call of the tenant with
            most waiting is refused as "overloaded".
        max_priority: Highest priority of a request, unless the caller's key allows more.
        console: Whether `/console` serves the console (docs/console.md), and the gateway remembers
            its last requests for it. With keys the page asks for one.
        metrics: Whether `GET /metrics` serves this process's metrics, even without
            `telemetry.metrics_port`. With keys it requires the scope "read".
    """

    SECTION: ClassVar[str] = "gateway"

    port: Port = 0
    grpc_port: Annotated[int | None, Range("a port, 0 for a free one, or null", 0, 65_535)] = None
    host: str = "127.0.0.1"
    insecure: bool = False
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    max_connections: PositiveInt = 4096
    max_body_bytes: PositiveInt = 16 << 20
    max_weights_bytes: PositiveInt = 256 << 20
    max_bodies_bytes: int = 512 << 20
    head_timeout_s: Seconds = 15.0
    keep_alive_s: Seconds = 60.0
    body_timeout_s: Seconds = 15.0
    min_body_bytes_per_s: NonNegativeInt = 4096
    send_timeout_s: Seconds = 60.0
    resume_grace_s: Annotated[float, Range("from 0 to 86400 (a day)", 0, 86_400)] = 30.0
    event_ids: bool | Literal["auto"] = "auto"
    comment_s: Seconds = 15.0
    message_format: str = "auto"
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    billing_lines: Literal["drop", "keep"] = "drop"
    continue_by_tokens: bool = False
    model_aliases: dict[str, str] = {}  # noqa: RUF012
    adapter_folder: str = ""
    chat_template_in_requests: bool = False
    template_timeout_s: Seconds = 5.0
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    access_log: bool = False
    shared_memory: bool = False
    max_tensor_bytes: PositiveInt = 256 << 20
    models: tuple[str, ...] = ()
    effects_by_get: Literal["none", "flush_cache", "all"] = "flush_cache"
    sync_timeout_s: Seconds = 300.0
    return_sampling_mask: bool = False
    health_timeout_s: Seconds = 20.0
    max_prompts: PositiveInt = 8192
    # One tenant may use half of the places.
    max_in_flight: Annotated[int | None, Range("at least 2, or null", 2)] = None
    max_waiting: PositiveInt = 16_384
    max_priority: int = 0
    console: bool = True
    metrics: bool = True

    @property
    def listens(self) -> bool:
        """Whether a pipeline starts a gateway beside it."""
        return bool(self.port) or self.grpc_port is not None

    def check(self) -> None:
        self.require("host", bool(self.host), "an address of this machine")
        for name in ("tls_certificate", "tls_key"):
            both = bool(self.tls_certificate) == bool(self.tls_key)
            self.require(name, both, "set where its other half is: certificate and key")
        if self.tls_client_ca:
            tls = bool(self.tls_certificate)
            self.require("tls_client_ca", tls, "empty without gateway.tls_certificate")
        self.require(
            "max_bodies_bytes",
            self.max_bodies_bytes >= max(self.max_body_bytes, self.max_weights_bytes),
            "at least gateway.max_body_bytes and gateway.max_weights_bytes, or a body of that size "
            "could never be taken",
        )
        plain = all(name and not set(name) & set("/: *") for name in self.allowed_hosts)
        self.require("allowed_hosts", plain, "names of hosts, without scheme and port")
        self.require(
            "allowed_origins",
            all(re.fullmatch(r"https?://[^/*\s]+", origin) for origin in self.allowed_origins),
            "origins such as https://example.org, without a path",
        )
        self.require("message_format", bool(self.message_format), "auto, off, a name or a file")
