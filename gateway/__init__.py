"""The gateway: HTTP in front of the bus, a client of it and no stage.

It takes the extra `gateway`. Each interface that it speaks is a package of routes beside the others:
`sglang`. What they share is in `http.py`; what stands before all of them in `callers.py`.
"""
