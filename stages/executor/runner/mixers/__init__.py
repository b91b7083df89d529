"""Mixers with recurrent state: layers that mix tokens otherwise than by attention over a KV cache.

`find` gives Transformers' own modules a forward pass whose operators keep their state in the cache.
`operators` is the contract of these operators, `reference` their definition in torch.
"""
