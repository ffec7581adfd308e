"""Imports the modules of PYTHON_TEST_IMPORTS when the interpreter starts.

With this directory in PYTHONPATH, the process from which the agents of simulated nodes are forked has them,
and all workers too. Each import of transformers takes seconds.
"""

from __future__ import annotations

import importlib
import os

for name in os.environ.get("PYTHON_TEST_IMPORTS", "").split():
    importlib.import_module(name)
