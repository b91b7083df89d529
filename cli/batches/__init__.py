"""`nano-inference batch`: a file of calls, answered into another file.

    rows ──► template ──► Line ──► calls (a server, or an engine here) ──► journal ──► tables

`rows` reads files, `lines` makes calls of rows, `calls` sends a call, `journal` keeps answers so
that a killed command loses none, `tables` writes CSV and Parquet, `run` does all of it, `server`
uses a server's own batches, and `commands` has the commands.
"""
