"""Admission: checks requests, turns text into tokens, and keeps the ledger of those in flight."""
