"""State: what layers keep of a sequence between steps.

`kinds` is the contract: a kind names its tensors, for each token or for each sequence. `memory`
allocates, copies, saves and drops them, whatever the kind.
"""
