"""What of this directory can be asked where numba, which the executor is compiled by, is missing?"""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("numba") else ["test_*.py"]
