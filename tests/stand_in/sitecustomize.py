"""Python imports this before any program: see `host_ops`."""

import os

if os.environ.get("DELTA_STAND_IN"):
    import host_ops

    host_ops.install()
