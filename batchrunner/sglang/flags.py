"""The flags of a version of SGLang, and its spelling of renamed ones."""

import functools
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HELP_TIMEOUT_S = 120.0
"""Patience in seconds: `--help` imports torch, which takes 6 s, and more from a cold network disk."""
CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
"""Environment variable: most tokens that SGLang reserves for the output of a request (schedule_policy)."""
VARIABLES = frozenset({CLIP})
"""Variables that count as flags."""
MAX_BLANKS_FLAG = "constrained-json-max-whitespace-cnt"
"""Flag: most blanks between two tokens of JSON that follows a schema (xgrammar); unbounded without it."""
MOST_BLANKS = 64
"""Its value where the run sets it: a line end and the indentation of 15 levels of four."""
CHECK_HELP = "unknown version: these are the newest spellings, check them with --help"
"""Note below advice where the version's flags are unknown."""
_SPELLINGS = (
    ("cuda-graph-max-bs-decode", "cuda-graph-max-bs"),
    ("cuda-graph-backend-decode", "disable-cuda-graph"),
    ("cuda-graph-backend-prefill", "enable-piecewise-cuda-graph"),
    ("attn-dp-size", "enable-dp-attention"),
    ("tp-size", "tensor-parallel-size", "tp"),
    ("dp-size", "data-parallel-size", "dp"),
    ("pp-size", "pipeline-parallel-size", "pp"),
    ("ep-size", "expert-parallel-size", "ep"),
)
"""The spellings of each renamed flag, newest first."""
_OPTION = re.compile(r"^  (?:-\w,? .*)?--.*", re.MULTILINE)  # argparse puts an option's names on one line
_NAME = re.compile(r"--([a-z0-9][\w-]*)(?: \{([^}]*)\})?")
_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of one version of SGLang; unknown without `names`."""

    version: str | None = None
    names: frozenset[str] = frozenset()
    """Names without the leading dashes."""
    choices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The allowed values of flags that have a choice."""

    def spelling(self, name: str) -> str | None:
        """Return a flag's name in this version, given any of its names; None where it lacks the flag."""
        names = spellings(name)
        if not self.names:
            return names[0]
        return next((spelling for spelling in names if spelling in self.names), None)

    def setting(self, name: str, value: Any) -> dict[str, Any]:
        """Return a flag's value as `engine.args` of this version; empty where the version lacks it."""
        spelling = name if name in VARIABLES else self.spelling(name)
        if spelling is None or str(value) not in self.choices.get(spelling, {str(value)}):
            return {}
        if spelling == "enable-dp-attention":
            return {spelling: True, "dp-size": value}
        if spelling.startswith("enable-"):
            return {spelling: None if value == "disabled" else True}
        if spelling == "disable-cuda-graph":
            return {spelling: True if value == "disabled" else None}
        return {spelling: value}


def name_in(args: Mapping[str, Any], name: str) -> str:
    """Return the spelling of a flag in `engine.args`, or `name` itself where the flag is absent."""
    return next((spelling for spelling in spellings(name) if spelling in args), name)


LARGEST = 1e15
"""Largest number that is plausible as an argument, limit or memory of a server."""


def number(value: Any) -> float | None:
    """Return a value of another program if it is a plausible number, otherwise None."""
    counts = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if counts else None


def attention_ranks(arguments: Mapping[str, Any]) -> int:
    """Return the ranks among which DP attention divides the requests of one replica; 1 without it."""
    ranks = number(arguments.get("attn_dp_size")) or 1
    older = ranks == 1 and arguments.get("enable_dp_attention")  # before --attn-dp-size
    return int((number(arguments.get("dp_size")) if older else ranks) or 1)


def arguments_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among flags and variables, for `engine.args`."""
    return {name: value for name, value in args.items() if name not in VARIABLES}


def variables_in(args: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables among flags and variables as texts, for `engine.env`."""
    return {name: str(value) for name, value in args.items() if name in VARIABLES}


def numbers_in(env: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of a job's variables that count as flags."""
    return {name: int(value) for name, value in env.items() if name in VARIABLES and value.isdecimal()}


def command_line(args: Mapping[str, Any]) -> str:
    """Write flags and variables as a person types them, the variables first."""
    ordered = {**variables_in(args), **args}
    return " ".join(_option(name, value) for name, value in ordered.items())


def _option(name: str, value: Any) -> str:
    if name in VARIABLES:
        return f"{name}={value}"
    if value is None:
        return f"without --{name}"
    return f"--{name}" if value is True else f"--{name} {value}"


def installed(python: str | None = None, environ: Mapping[str, str] | None = None) -> Flags:
    """Return the flags of an interpreter's SGLang; without names where it has none.

    `environ` is the job's `engine.env`. The first call runs `--help`, some 6 s; later ones are cached.
    """
    return _ask(python or sys.executable, tuple(sorted((environ or {}).items())))


def version_of(python: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the version of an interpreter's SGLang; `environ` is the job's. None where it has none."""
    from batchrunner.sglang.device import output_of, program_environment  # noqa: PLC0415 - few runs ask

    command = [python or sys.executable, "-c", _VERSION]
    return output_of(command, HELP_TIMEOUT_S, program_environment(environ)).strip() or None


def is_at_least(version: str | None, *least: int) -> bool:
    """Tell whether a version of SGLang, such as 0.5.23, is known and at least another."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is not None and tuple(map(int, numbers.groups())) >= least


def of_arguments(version: str | None, arguments: Iterable[str]) -> Flags:
    """Return the flags of a server by all its arguments, from `/server_info` or its log."""
    return Flags(version, frozenset(name.replace("_", "-") for name in arguments))


def parse_help(text: str, version: str | None = None) -> Flags:
    """Read the output of `python -m sglang.launch_server --help`."""
    options = [name.groups() for option in _OPTION.findall(text) for name in _NAME.finditer(option)]
    choices = {name: frozenset(values.split(",")) for name, values in options if values}
    return Flags(version, frozenset(name for name, _ in options), choices)


def spellings(name: str) -> tuple[str, ...]:
    """Return all names of a flag, the newest first."""
    return next((names for names in _SPELLINGS if name in names), (name,))


class StatePool(NamedTuple):
    """The pool of one scheduler for the states of a hybrid model. A state does not grow with its request."""

    slots: int
    """`max_mamba_cache_size`."""
    per_request: int
    """Slots that a running request takes."""
    gb: float | None = None
    """Memory of the pool in GB."""
    kv_gb: float | None = None
    """Memory of the KV pool in GB, which shares the card with it."""

    @property
    def most_running(self) -> int:
        """Most running requests whose states it holds."""
        return self.slots // self.per_request


STATE_RATIO = 0.9
"""SGLang's default of `--mamba-full-memory-ratio`: memory of the state pool by memory of the KV pool."""
_SLOTS = {"extra_buffer": 5, "extra_buffer_lazy": 4}
"""State slots of a running request by `--mamba-radix-cache-strategy`; 3 with any other, 1 without a prefix
cache (`_calculate_mamba_ratio` in SGLang's kv_cache_configurator.py)."""


def slots_per_request(arguments: Mapping[str, Any]) -> int:
    """Return the state slots that a running request takes, by the server's resolved arguments."""
    if arguments.get("disable_radix_cache"):
        return 1
    slots = _SLOTS.get(str(arguments.get("mamba_radix_cache_strategy")), 3)
    return slots - (slots == _SLOTS["extra_buffer"] and bool(arguments.get("disable_overlap_schedule")))


@functools.cache
def _ask(python: str, environ: tuple[tuple[str, str], ...]) -> Flags:
    from batchrunner.sglang.device import has_gpu, output_of, program_environment  # noqa: PLC0415

    environment = program_environment(dict(environ), cpu=not has_gpu())
    help_text = output_of([python, "-m", "sglang.launch_server", "--help"], HELP_TIMEOUT_S, environment)
    return parse_help(help_text, version_of(python, dict(environ)))
