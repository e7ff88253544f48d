"""Servers that tests start import torch, transformers and SGLang with a sixth less CPU time.

Python imports this file at its start where its folder is in PYTHONPATH. An import makes millions of objects
that stay: looking for garbage among them every 700 objects finds none.
"""

import gc
import sys

OBJECTS = 50_000
"""New objects between two collections of the youngest generation; Python's own number is 700."""

if any("launcher.py" in word or "spawn_main" in word for word in sys.orig_argv):  # a server, or a part of it
    gc.set_threshold(OBJECTS, 10, 10)
