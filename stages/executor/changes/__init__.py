"""Staged changes of weights, memory and adapters, each put in place by a plan."""
