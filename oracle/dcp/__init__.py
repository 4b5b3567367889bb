"""What is right when a cache is sharded over ranks?"""
