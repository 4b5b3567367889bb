"""What do the bits of every number format mean, and which bits does a number round to?"""
