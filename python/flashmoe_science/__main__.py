"""`python -m flashmoe_science` is the `flashmoe` command."""

from __future__ import annotations

import sys

from flashmoe_science.cli import main

if __name__ == "__main__":
    sys.exit(main())
