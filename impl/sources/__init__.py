"""Where the kernels that other people wrote are found."""
