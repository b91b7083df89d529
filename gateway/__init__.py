"""The gateway: HTTP and gRPC in front of the bus, a client of it and no stage.

`server/` has connections, TLS and limits, `serving/` the submission of requests, `policy/` the
checks of callers and requests, and each folder of `api/` one interface.
"""
