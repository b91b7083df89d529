"""The driver: sequence table, constraints, drafts, sampling and results. It decides each step."""
