"""Receives spans over OTLP and HTTP for `telemetry.py`, in its own process.

Prints its port. `/NAME/v1/traces` takes spans; `/NAME` returns how many it received, and decodes
them only then.
"""

from __future__ import annotations

from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

RECEIVED: dict[str, list[bytes]] = defaultdict(list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        RECEIVED[self.path.removesuffix("/v1/traces")].append(body)
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(str(sum(map(number_of_spans, RECEIVED[self.path]))).encode())

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def number_of_spans(body: bytes) -> int:
    request = ExportTraceServiceRequest.FromString(body)
    return sum(
        len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans
    )


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
