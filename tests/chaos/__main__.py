from __future__ import annotations

import sys

from tests.chaos.main import main

sys.exit(main(sys.argv[1:]))
