"""What must be settled before any test imports torch or triton?

Triton reads TRITON_INTERPRET when a kernel is decorated, and torch its thread count when it is imported; one thread a
worker, since the workers share the cores.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
