"""`python -m dsplit`, so that `accelerate launch -m dsplit train ...` works."""

import sys

from dsplit.cli import main

sys.exit(main())
