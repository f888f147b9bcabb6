"""The package `tinker` for the processes of `python -m tinkex.compat`."""

import sys
from importlib import import_module

del sys.modules["tinker"]
import_module("tinkex.compat").install()
import_module("tinker")
