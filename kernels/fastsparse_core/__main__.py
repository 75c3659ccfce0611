"""``python -m fastsparse_core`` runs the command ``fastsparse``."""

import sys

from fastsparse_run import main

sys.exit(main())
