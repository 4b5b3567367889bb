"""What do we ask of casts between number formats?"""
