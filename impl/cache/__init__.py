"""Who writes and reads paged caches?"""
