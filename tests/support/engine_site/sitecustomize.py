"""Servers that tests start import torch, transformers and SGLang with a third of the CPU time.

Python imports this file at its start where its folder is in PYTHONPATH.

An import makes millions of objects that stay: looking for garbage among them every 700 objects finds none.

SGLang starts its scheduler and detokenizer with `spawn`, so that each imports everything again, for 12 s of
CPU time. On a CPU they can be forks as well. A test that is about these processes names a file by SPAWN:
servers that start while it is there have them as users have them.

SGLang's LoRA adapters lie in pinned memory, for which torch needs the driver of a GPU. A test of adapters
sets UNPINNED, and then no memory is pinned.
"""

import gc
import os
import sys

OBJECTS = 50_000
"""New objects between two collections of the youngest generation; Python's own number is 700."""
SPAWN, UNPINNED = "BATCHRUNNER_TEST_SPAWN", "BATCHRUNNER_TEST_UNPINNED"

if any("launcher.py" in word or "spawn_main" in word for word in sys.orig_argv):  # a server, or a part of it
    gc.set_threshold(OBJECTS, 10, 10)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" and not os.path.isfile(os.environ.get(SPAWN, "")):  # noqa: PTH113
        import multiprocessing

        set_method = multiprocessing.set_start_method

        def fork(method: str | None, force: bool = False) -> None:
            """Take `fork` for whatever method is asked for."""
            set_method(method and "fork", force=force)

        multiprocessing.set_start_method = fork

    if UNPINNED in os.environ:
        from collections.abc import Callable
        from typing import Any

        import torch

        def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
            """Return a function that makes a tensor, in memory as any other."""
            return lambda *args, pin_memory=False, **named: make(*args, **named)  # noqa: PLW0108 - it drops one

        for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
            setattr(torch, name, unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda tensor, _device=None: tensor
