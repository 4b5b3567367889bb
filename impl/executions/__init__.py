"""Where a kernel runs: the faithful interpreter on a CPU, or a device."""
