"""Random and mutated requests of all interfaces of the gateway, each with the answer that it must
have.

`cases.case(seed, number)` makes one of them from these two numbers alone.
"""
