"""Requests on their way through the engine, and durable calls: what all interfaces share."""
