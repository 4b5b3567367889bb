"""What is right for sparse MLA attention over packed KV records."""
