"""Snapshots of recurrent state: their numbers, and the places in sequences where they are made."""
