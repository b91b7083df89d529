"""The gateway: HTTP and gRPC in front of the bus, a client of it and no stage.

Imports run one way, to the left; import-linter checks it:

    caller ← call ← server ← serving ← policy ← api ← console ← endpoints ← app ← deployment
                                                                                   ↑
                                                                                gateway

- `caller.py`, `call.py`: a call of any protocol, as everything below the transports uses it.
- `server/`: connections, TLS, limits, HTTP's framing, and the observation of calls.
- `serving/`: submissions, durable calls, prompts and images, the order of a call's checks, the log
  of requests.
- `policy/`: the checks themselves: keys, tenants, limits, guardrails, the audit log.
- `api/`: the routes, and each folder one interface that imports no other.
- `console/`: the pages of the console, and their feed.
- `endpoints.py`, `dead_letters.py`: endpoints of the gateway as a whole.
- `app.py`: the application for one model; `deployment/`: for several.
- `gateway.py`: an application that listens.
"""
