"""Who casts between number formats?"""
