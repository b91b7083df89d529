"""KServe V2 over HTTP and gRPC, as Triton's clients speak it; docs/kserve.md lists what there is.

`service.py` is what both have in common: models, who may call them, and how long it may take.
"""
