"""`python -m tests.sim SEEDS`."""

import sys

from tests.sim.main import main

sys.exit(main(sys.argv[1:]))
