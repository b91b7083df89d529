"""Formats of quantised weights in checkpoints, each read to codes.

`stored` has the contract and the checks that formats share, `choose` finds the format of a
`quantization_config`. A format is pure: it turns the tensors of one layer into codes. The files are
read by `runner.quantization.loading`.
"""
