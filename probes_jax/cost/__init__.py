"""What monitoring costs, found before a run: compiled programs read, not run."""

from probes_jax.cost.inspection import Cost, Inspection, Program, inspect
from probes_jax.cost.preview import Preview, Share, preview
from probes_jax.cost.topology import topology
from probes_jax.cost.traffic import Collective

__all__ = ["Collective", "Cost", "Inspection", "Preview", "Program", "Share", "inspect", "preview", "topology"]
