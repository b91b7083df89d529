"""Linear layers: one contract for how a layer holds its weights and multiplies by them.

`method` is the contract, `dense` has torch's layers in bfloat16 or float32, and `choose` finds the
method of a module. `ranks.linear` has the layers that ranks compute together, and `adapters.layers`
one with adapters.
"""
