"""Puts the stand-ins in place in a sweep's workers, which load it by `PYTEST_PLUGINS=standin_plugin`."""

import standin_ops

standin_ops.put_in_place()
