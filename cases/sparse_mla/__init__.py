"""Sparse MLA attention over packed KV records."""
