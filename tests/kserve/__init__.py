"""KServe V2 for clients and servers."""
