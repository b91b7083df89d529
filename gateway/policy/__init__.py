"""Access control: keys, scopes, limits, guardrails and the audit log; docs/policy.md."""
