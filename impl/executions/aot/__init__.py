"""What do kernels become for a GPU that is not here: compiled ahead of time from launches captured without memory?"""
