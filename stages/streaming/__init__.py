"""Streaming: from sampled tokens to text, and the one terminal message of each request."""
