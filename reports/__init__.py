"""What happened: run, record, compare, gate and render."""
