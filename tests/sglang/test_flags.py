"""Advice names a flag as the server at hand spells it, or not at all."""

import sys
from pathlib import Path

import pytest

from batchrunner.sglang.flags import installed, parse_help
from tests.conftest import require_engine

OLD = """usage: launch_server.py [-h] --model-path MODEL_PATH [--cuda-graph-max-bs CUDA_GRAPH_MAX_BS]

options:
  -h, --help            show this help message and exit
  --tensor-parallel-size TENSOR_PARALLEL_SIZE, --tp-size TENSOR_PARALLEL_SIZE
  --schedule-policy {lpm,random,fcfs,dfs-weight}
                        The scheduling policy; --made-up-flag is not one.
  --attention-backend {flashinfer,triton,torch_native}
  --cuda-graph-max-bs CUDA_GRAPH_MAX_BS
  --enable-dp-attention
                        See --attn-dp-size in later releases.
"""
NEW = """
  --cuda-graph-max-bs-decode CUDA_GRAPH_MAX_BS_DECODE
  --cuda-graph-backend-prefill {full,breakable,disabled}
  --attn-dp-size ATTN_DP_SIZE, --attention-data-parallel-size ATTN_DP_SIZE
  --enable-dp-attention
                        Deprecated. Use --attn-dp-size <dp-size> instead.
"""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("cuda-graph-max-bs", "cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
        ("cuda-graph-max-bs-decode", "cuda-graph-max-bs", "cuda-graph-max-bs-decode"),
        ("cuda-graph-backend-prefill", None, "cuda-graph-backend-prefill"),
        ("attn-dp-size", "enable-dp-attention", "attn-dp-size"),
        ("made-up-flag", None, None),
    ],
)
def test_a_flag_is_spelled_as_the_version_does(name: str, old: str | None, new: str | None) -> None:
    """Whichever release's name one asks by, the installed one's comes back, or none."""
    assert parse_help(OLD).spelling(name) == old
    assert parse_help(NEW).spelling(name) == new


def test_a_setting_is_what_the_version_takes() -> None:
    """A renamed flag may take another value, and a value that a release does not know is not named."""
    old, new = parse_help(OLD), parse_help(NEW)
    assert new.setting("attn-dp-size", 8) == {"attn-dp-size": 8}
    assert old.setting("attn-dp-size", 8) == {"enable-dp-attention": True, "dp-size": 8}
    assert old.setting("attention-backend", "flashinfer") == {"attention-backend": "flashinfer"}
    assert old.setting("attention-backend", "trtllm_mha") == {}
    assert old.setting("cuda-graph-backend-prefill", "full") == {}


def test_the_interpreter_is_asked_once(tmp_path: Path) -> None:
    """The installed server's own --help decides, and is not run for every question."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    asked = tmp_path / "asked"
    (package / "launch_server.py").write_text(f"open({str(asked)!r}, 'a').write('x')\nprint({OLD!r})\n")
    environ = {"PYTHONPATH": str(tmp_path)}
    assert installed(sys.executable, environ).spelling("cuda-graph-max-bs-decode") == "cuda-graph-max-bs"
    assert installed(sys.executable, environ) is installed(sys.executable, environ)
    assert asked.read_text() == "x"


@pytest.mark.engine
@pytest.mark.long
def test_the_real_help_is_read() -> None:
    """What the installed SGLang prints is understood: flags, aliases and choices."""
    require_engine("sglang")
    flags = installed()
    assert flags.version
    assert flags.spelling("cuda-graph-max-bs") == "cuda-graph-max-bs-decode"
    assert flags.setting("kv-cache-dtype", "fp8_e4m3") == {"kv-cache-dtype": "fp8_e4m3"}
    assert flags.setting("attention-backend", "trtllm_mha")
    assert not flags.setting("quantization", "made-up")
    assert {"enable-hierarchical-cache", "schedule-conservativeness", "tensor-parallel-size"} <= flags.names
