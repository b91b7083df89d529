"""A model over several ranks: processes that each hold a shard and run the same steps.

Rank 0 is the executor; it holds the driver, and broadcasts its step inputs to the model runners of
the other ranks.
"""
