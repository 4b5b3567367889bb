"""What do we ask of the kernels that write and read paged caches?"""
