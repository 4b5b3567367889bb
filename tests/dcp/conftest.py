"""Starts this directory's kernels on the faithful interpreter; Triton reads the variable when it is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from impl.executions import interpreter

interpreter.install()
