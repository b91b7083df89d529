"""The gateway: HTTP in front of the bus, a client of it and no stage.

Each interface that it speaks, `sglang` and `openai`, is a package of routes. `http.py` has what
they share, `callers.py` what stands before all of them.
"""
