"""Images in prompts, and their embeddings."""
