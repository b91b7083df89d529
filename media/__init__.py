"""Images of prompts: decoding in processes of their own, and fetching from addresses."""
