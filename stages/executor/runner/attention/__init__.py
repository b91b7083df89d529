"""Attention over the paged KV cache: one contract, in `backend`, and several back ends.

`choose` selects one when a model is loaded. `interface` puts it into Transformers' models and
probes their layers.
"""
