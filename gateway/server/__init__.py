"""Connections, TLS, limits, and the HTTP that all interfaces share."""
