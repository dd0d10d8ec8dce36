"""The switch in the environment."""

from __future__ import annotations

import os

OFF = "monitoring is off (PROBES_JAX=off)"


def enabled() -> bool:
    """False when the environment says PROBES_JAX=off: every call is then a plain train step."""
    return os.environ.get("PROBES_JAX", "on").lower() not in ("off", "0", "false", "no")
