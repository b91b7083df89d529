"""KServe V2, as Triton's clients speak it: tensors, their codec, shared memory, and a client.

What a client and a server both need; the server is `nano_inference.gateway.kserve`. docs/kserve.md
has examples.
"""
