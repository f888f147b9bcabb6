"""`python -m tinkex`: the command line, where the script `tinkex` is not on the path."""

from __future__ import annotations

from tinkex.cli.main import main

if __name__ == "__main__":
    main()
