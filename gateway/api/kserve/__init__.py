"""KServe V2 over HTTP and gRPC, as Triton's clients speak it (docs/kserve.md).

`service.py` and `operations.py` are shared by both transports.
"""
