"""What is right when numbers are quantised and quantised numbers are multiplied?"""
