"""`python -m probes_jax` is the command `probes`."""

import sys

from probes_jax.present.cli import main

if __name__ == "__main__":
    sys.exit(main())
