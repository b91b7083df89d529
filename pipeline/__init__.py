"""Which stages run where, the links between them, their supervision, and what callers use."""
