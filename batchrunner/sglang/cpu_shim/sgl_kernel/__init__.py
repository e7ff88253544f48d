"""A stand-in for the CUDA-only `sgl_kernel`, so that SGLang serves dense models on a CPU.

SGLang's CPU path imports the functions in `_NAMES` when it starts, but the published wheel, which is built
for CUDA, has none of them. A dense Llama never calls them. Each function raises when it is called, so that a
model that needs it fails with an error message instead of wrong numbers. Operators of torch that SGLang looks
up when it imports its Qwen vision models are declared too, without an implementation. The folder that
contains this package must be first on the PYTHONPATH of a server on a CPU, and of no other process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

# Only the names that the CPU path imports. Any other name must raise ImportError, because SGLang relies on
# this error for its own fallbacks (`except ImportError`).
_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
)
# Operators that `models/qwen3_5.py` looks up. The processor of all Qwen vision models imports this module.
_OPERATORS = (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
_SUBMODULES = ("elementwise", "flash_attn", "mamba", "quantization", "utils")


def _absent(name: str) -> Callable[..., NoReturn]:
    """Return a function of `sgl_kernel` that raises NotImplementedError when it is called."""

    def kernel(*_args: Any, **_kwargs: Any) -> NoReturn:
        message = f"this model needs the sgl_kernel function {name!r}, which has no CPU build here"
        raise NotImplementedError(message)

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


def _submodule(name: str) -> ModuleType:
    """Return a submodule of `sgl_kernel` in which every name is a function that raises when it is called."""
    module = ModuleType(f"{__name__}.{name}")

    def lookup(attribute: str) -> Callable[..., NoReturn]:
        # `inspect` and `pickle` look up names such as `__wrapped__`, which are not kernels.
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _absent(f"{name}.{attribute}")

    module.__dict__["__getattr__"] = lookup
    return module


globals().update({name: _absent(name) for name in _NAMES})
for _name in _SUBMODULES:
    sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _submodule(_name)
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in _OPERATORS:
    _library.define(f"{_name}(Tensor one, Tensor other) -> Tensor")
