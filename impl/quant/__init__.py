"""Who quantises, and who multiplies quantised numbers?"""
