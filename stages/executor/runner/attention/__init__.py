"""Attention over the paged KV cache: one contract, in `backend`, and several back ends for it.

`choose` takes one when a model is loaded. `interface` puts it into Transformers' models, and
`probe` finds out at load what their layers need. This file imports none of them.
"""
