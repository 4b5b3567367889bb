"""Puts the stand-ins in place in a sweep's workers, which load it by `PYTEST_PLUGINS=standin_plugin`."""

import os
import resource

import standin_ops

if "PYTEST_XDIST_WORKER" in os.environ and "STANDIN_ROOM" in os.environ:
    # A full disk: no file of a worker grows beyond so many bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["STANDIN_ROOM"]), resource.RLIM_INFINITY))

standin_ops.put_in_place()
