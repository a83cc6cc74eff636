"""`python -m looped` is the command `looped`."""

import sys

from looped.cli import main

sys.exit(main())
