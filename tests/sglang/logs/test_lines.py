"""What SGLang 0.5.23 writes while it starts."""

import pytest

from batchrunner.sglang.logs.lines import step_in

CAPTURE = "Capture target decode CUDA graph"


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("[2026-11-22 04:51:00] Load weight begin. avail mem=78.58 GB", "loading the weights"),
        (
            "Loading safetensors checkpoint shards:  75% Completed | 3/4 [00:01<00:00,  2.46it/s]",
            "loading the weights, 3 of 4",
        ),
        ("copying /shared/m (14.2 GiB) to /scratch/3f/m", "copying the model"),
        ("[… TP0] Load weight end. elapsed=1.7 s, mem usage=0.01 GB.", "making the KV pool"),
        (f"[… TP0] {CAPTURE} begin. backend=full, avail mem=5.14 GB", "capturing graphs"),
        ("Capturing batches (bs=56):  12%|█▏        | 3/25 [00:01<00:07]", "capturing graphs, 3 of 25"),
        (f"[… TP0] {CAPTURE} end. bs=[1, 2], elapsed=9.91 s, mem usage=0.53 GB", "warming up"),
        ("Compiling num tokens (num_tokens=8192):   2%|▏         | 1/58 [00:00<00:31]", "compiling, 1 of 58"),
        ("DeepGEMM warmup:  50%|█████     | 8/16 [00:03<00:03,  2.46it/s]", "compiling, 8 of 16"),
        ("[… TP0] … has no files matching *; will attempt download.", "downloading the model"),
        ("Multi-thread loading shards:  50% Completed | 2/4 [00:01<00:01]", "loading the weights, 2 of 4"),
        ("[… TP0] UserWarning: torch.cpu.amp is deprecated", ""),
        ("[…] server_args={'torch_compile_max_bs': 32, 'load_format': 'auto'}", "starting its processes"),
    ],
)  # fmt: skip
def test_what_a_starting_server_does(line: str, step: str) -> None:
    """Each step is told in plain words, with how far it is."""
    assert step_in(line) == step
