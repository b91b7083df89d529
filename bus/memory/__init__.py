"""The bus within one process."""
