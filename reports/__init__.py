"""What happened: run, record, compare, gate and render.

`check` asks a function of the user's own the sweep's cases; `CheckFailed` and `CheckMisuse` are how it complains.
"""

from reports.foreign import CheckFailed, CheckMisuse, check

__all__ = ["CheckFailed", "CheckMisuse", "check"]
