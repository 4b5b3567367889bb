"""What do we ask of decode context parallelism: a cache sharded over ranks?"""
