"""The five stages. None imports another: all that two share is messages."""
