"""`python -m transformers_packed.cli`: the command line."""

import sys

from . import main


sys.exit(main())
