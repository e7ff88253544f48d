"""What a card gives an 8B-shaped model: with default flags, after `advise`, after `tune`; and its memory.

The weights are dummies in the shape of Llama 3.1 8B (`--load-format dummy`): they compute what real ones do,
and `ignore_eos` with each row's own length makes up for the noise that they write. Lengths are LMSYS-Chat's.
Four steps, each saved as it ends, so that a machine that is lent for minutes can do them one by one:

- `default`: the job with no flags of its own;
- `advise`: what `batchrun advise` says of that run is done, until it says nothing more;
- `tune`: `batchrun tune` from the default flags, and a run with what it found;
- `memory`: `available_gpu_mem` at several values of `--mem-fraction-static`, against the straight line by
  which `advise` moves that flag.

Without a GPU, `--model` with a
small model tries the steps out; its figures say nothing, and are printed instead of saved.
"""

import argparse
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

import batchrunner
from batchrunner.advise.advise import advise
from batchrunner.core.console import tell
from batchrunner.engines.device import card_name, has_gpu
from batchrunner.engines.logs.series import GUIDES
from batchrunner.tune.tuner import tune
from benchmarks.engine import LONGEST_TOKENS, PROMPT_TOKENS, lognormal
from benchmarks.measure import RESULTS, save
from tests.support.tiny_model import TOKENIZER_FILES

SEED = 17
OUTPUT_TOKENS = (222, 210)
"""Mean and standard deviation, those of LMSYS-Chat."""
TOKENS = (100, 45_000)
"""From which prompts are drawn."""
MOST_ADVICE = 4
"""Rounds of advice."""
FRACTIONS = (-0.06, -0.03, 0.02, 0.04)
"""From what the server chose for `--mem-fraction-static`."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Source: the config.json of meta-llama/Llama-3.1-8B, but for its longest context."""
Figures: TypeAlias = dict[str, Any]


def make_shape(folder: Path, tokenizer_from: Path) -> Path:
    """Write a model's folder without weights."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, folder / name)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def write_input(path: Path, rows: int) -> None:
    made = random.Random(SEED)
    ids = [[made.randrange(*TOKENS) for _ in range(lognormal(made, *PROMPT_TOKENS))] for _ in range(rows)]
    tokens = [min(LONGEST_TOKENS, lognormal(made, *OUTPUT_TOKENS)) for _ in range(rows)]
    table = {"input_ids": pa.array(ids, pa.list_(pa.int32())), "tokens": pa.array(tokens, pa.int32())}
    pq.write_table(pa.table(table), path, row_group_size=1000)


@dataclass
class Lab:
    """A job, and the flags that the machine needs whatever the step."""

    folder: Path
    model: Path
    needed: Figures
    budget_s: float
    found: Figures = field(default_factory=dict)

    def job(self, name: str, args: Figures, **input_spec: Any) -> Figures:
        return {
            "input": {"path": str(self.folder / "input.parquet"), **input_spec},
            "prompt": {"input_ids": "input_ids"},
            "sampling": {"max_new_tokens": {"column": "tokens"}, "ignore_eos": True, "temperature": 0},
            "output": {"path": str(self.folder / name)},
            "engine": {"kind": "server", "model": str(self.model), "args": {**self.needed, **args}},
        }

    def run(self, name: str, args: Figures, **input_spec: Any) -> Figures:
        """Run the job afresh under these flags; what it reached, and what is to be said of it."""
        report = batchrunner.run(self.job(name, args, **input_spec), fresh=True)
        if report.exit_code:
            raise SystemExit("\n".join(report.lines()))
        judged = advise(report.path)
        facts = judged.situation.facts
        found = {
            "args": args, "tokens_per_s": report.output_tokens_per_s, "wall_s": report.wall_s,
            "ready": facts.ready and facts.ready._asdict(),
            "mem_fraction_static": facts.number("mem_fraction_static"), "card_gb": facts.card_gb,
            "load": report.load, "incidents": report.incidents,
            "advice": [said.as_dict() for said in judged.advice], "lines": judged.lines(),
        }  # fmt: skip
        tell(json.dumps(found, default=str))
        return found

    def default(self) -> Figures:
        return self.run("default", {})

    def advised(self) -> list[Figures]:
        """Follow what is said of the run before, as one would."""
        rounds = [self.found.get("default") or self.default()]
        while len(rounds) <= MOST_ADVICE:
            args = dict(rounds[-1]["args"])
            for said in rounds[-1]["advice"]:
                args |= said["args"]
            args = {name: value for name, value in args.items() if value is not None}
            if args == rounds[-1]["args"]:
                break
            rounds.append(self.run(f"advise-{len(rounds)}", args))
        return rounds[1:]

    def tuned(self) -> Figures:
        job = self.folder / "job.yaml"
        job.write_text(json.dumps(self.job("tuned", {})))
        found = tune(str(job), overrides=[], budget_s=self.budget_s)
        tell(*found.lines())
        args = {name: value for name, value in found.args.items() if name not in self.needed}
        return {"tune": {**found.as_dict(), "job": "job.yaml"}, "run": self.run("tuned", args)}

    def memory(self) -> list[Figures]:
        """Start with other fractions; the line goes through what the server chose by itself."""
        own = self.run("memory", {}, limit=1)
        if own["ready"] is None or own["ready"]["gpu_gb"] is None:
            return []
        points = [own]
        for step in FRACTIONS:
            fraction = round(own["mem_fraction_static"] + step, 3)
            points.append(self.run("memory", {"mem-fraction-static": fraction}, limit=1))
        return [
            {
                "mem_fraction_static": point["mem_fraction_static"],
                "available_gpu_gb": point["ready"]["gpu_gb"],
                "by_the_line_gb": own["ready"]["gpu_gb"]
                - (point["mem_fraction_static"] - own["mem_fraction_static"]) * own["card_gb"],
                "good_gb": GUIDES.memory_good_gb,
                "said": [
                    said["change"] or said["sign"]
                    for said in point["advice"]
                    if said["rule"] in {"memory-left", "memory-tight"}
                ],
            }
            for point in points
        ]


STEPS: dict[str, Callable[[Lab], Any]] = {
    "default": Lab.default, "advise": Lab.advised, "tune": Lab.tuned, "memory": Lab.memory,
}  # fmt: skip


def line_of(model: str, found: Figures) -> str:
    """Say the speeds of the steps that are there."""
    speeds = {
        "default flags": found.get("default"),
        "after advise": (found.get("advise") or [found.get("default")])[-1],
        "after tune": found.get("tune", {}).get("run"),
    }
    told = [f"{name} {run['tokens_per_s']:,.0f} tok/s" for name, run in speeds.items() if run]
    return f"{model}, {card_name() or 'no GPU'}: {'; '.join(told) or 'memory only'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("steps", nargs="*", default=[], help=f"of {', '.join(STEPS)}; all by default")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for tune")
    parser.add_argument("--args", type=json.loads, default={}, help="flags that this machine needs, as JSON")
    parser.add_argument("--model", type=Path, help="a model's folder, instead of the shape")
    parser.add_argument("--tokenizer", type=Path, default=Path("data/smollm2-135m-instruct"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("batchrunner").setLevel(logging.INFO)
    if not has_gpu() and options.model is None:
        raise SystemExit("skipped: no GPU (--model with a small model tries the steps out on the CPU)")
    saved = RESULTS / "card.json"
    with tempfile.TemporaryDirectory(prefix="bench-card-") as scratch:
        folder = Path(scratch)
        write_input(folder / "input.parquet", options.rows)
        model, dummy = options.model, {}
        if model is None:
            model, dummy = (
                make_shape(folder / "llama-3.1-8b-dummy", options.tokenizer),
                {"load-format": "dummy"},
            )
        before = json.loads(saved.read_text())["steps"] if has_gpu() and saved.is_file() else {}
        lab = Lab(folder, model.resolve(), {**dummy, **options.args}, options.budget, before)
        for name in options.steps or STEPS:
            lab.found[name] = STEPS[name](lab)
            figures = {"card": card_name(), "rows": options.rows, "needed": lab.needed, "steps": lab.found}
            if has_gpu():
                save("card", line_of(model.name, lab.found), figures, ("batchrunner", "sglang", "torch"))
            else:
                print(line_of(model.name, lab.found))


if __name__ == "__main__":
    main()
