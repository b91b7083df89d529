"""Ways to read the KV blocks that another executor offers.

`connect` chooses by where both executors are: in one process, on one host, or on two hosts.
"""
