"""Files and batches: calls that come as lines of a file and are answered into another file.

    upload ──► Files ──► BatchRunner ──► each line a Call through all of the policy ──► Files

`files` keeps files, `lines` reads and writes their lines, `runner` runs unfinished batches on every
gateway. Which lines have an answer is in `store.batches`.
"""
