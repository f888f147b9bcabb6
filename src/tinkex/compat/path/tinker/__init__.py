"""Is on the path of processes that `python -m tinkex.compat` starts, and makes way for tinkex when
imported.
"""

import sys
from importlib import import_module

del sys.modules["tinker"]
import_module("tinkex.compat").install()
import_module("tinker")
