"""Sequences that go on at another replica after their first token."""
