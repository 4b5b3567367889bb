"""What must lie in a paged cache after a write, and what must come out of a read?"""
