"""What do we ask of quantisers and of products of quantised numbers?"""
