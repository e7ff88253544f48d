"""The flags of an SGLang version, and the version's spelling of flags that were renamed."""

import functools
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

HELP_TIMEOUT_S = 120.0
"""Maximum seconds for `--help`, which imports torch: 6 s usually, and longer from a cold network disk."""
CLIP = "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"
"""Environment variable with the maximum number of output tokens that SGLang reserves for a request
(schedule_policy.py)."""
VARIABLES = frozenset({CLIP})
"""Environment variables of the server that tuning handles like flags."""
MAX_BLANKS_FLAG = "constrained-json-max-whitespace-cnt"
"""Flag for the maximum number of blanks between two tokens of JSON that follows a schema (xgrammar). By
default, there is no maximum."""
MOST_BLANKS = 64
"""Default value of MAX_BLANKS_FLAG in a run: enough for a line end and 15 levels of indentation by four
blanks."""
CHECK_HELP = "unknown version: these are the newest spellings, check them with --help"
"""Note below advice for a server whose version of SGLang is unknown."""
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
# argparse puts all names of an option on one line.
_OPTION = re.compile(r"^  (?:-\w,? .*)?--.*", re.MULTILINE)
_NAME = re.compile(r"--([a-z0-9][\w-]*)(?: \{([^}]*)\})?")
_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags of one version of SGLang. If `names` is empty, the flags are unknown."""

    version: str | None = None
    names: frozenset[str] = frozenset()
    """Names without the leading dashes."""
    choices: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The allowed values of each flag that has a fixed set of values."""

    def spelling(self, name: str) -> str | None:
        """Return the name of a flag in this version, from any of its names; None if the version lacks it.

        If the version's flags are unknown, return the newest name.
        """
        names = spellings(name)
        if not self.names:
            return names[0]
        return next((spelling for spelling in names if spelling in self.names), None)

    def setting(self, name: str, value: Any) -> dict[str, Any]:
        """Translate a flag and its value for this version of SGLang; return them as in `engine.args`.

        `name` is the newest spelling; an older spelling may need another value. Return {} if the version
        lacks the flag or does not allow the value.
        """
        spelling = name if name in VARIABLES else self.spelling(name)
        if spelling is None or str(value) not in self.choices.get(spelling, {str(value)}):
            return {}
        # The older spellings are switches: True sets a switch, and None leaves it out.
        if spelling == "enable-dp-attention":
            return {spelling: True, "dp-size": value}
        if spelling.startswith("enable-"):
            return {spelling: None if value == "disabled" else True}
        if spelling == "disable-cuda-graph":
            return {spelling: True if value == "disabled" else None}
        return {spelling: value}


def name_in(args: Mapping[str, Any], name: str) -> str:
    """Return the spelling of a flag in `engine.args`, or `name` itself if the flag is absent."""
    return next((spelling for spelling in spellings(name) if spelling in args), name)


LARGEST = 1e15
"""Maximum of a plausible number in an argument, limit or memory size of a server."""


def number(value: Any) -> float | None:
    """Return a number from another program as a float; None if it is not a number or implausibly large."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST else None


def attention_ranks(arguments: Mapping[str, Any]) -> int:
    """Return the number of ranks among which DP attention divides the requests of a replica.

    It is 1 without DP attention.
    """
    ranks = number(arguments.get("attn_dp_size")) or 1
    # Releases before --attn-dp-size have the number of ranks in --dp-size.
    is_older_release = ranks == 1 and arguments.get("enable_dp_attention")
    if is_older_release:
        ranks = number(arguments.get("dp_size")) or 1
    return int(ranks)


def arguments_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server arguments in `args`, without the environment variables in it."""
    return {name: value for name, value in args.items() if name not in VARIABLES}


def variables_in(args: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables in `args`, as strings for `engine.env`."""
    return {name: str(value) for name, value in args.items() if name in VARIABLES}


def numbers_in(env: Mapping[str, str]) -> dict[str, int]:
    """Return the variables of `engine.env` that are tuned like flags (VARIABLES), as integers."""
    return {name: int(value) for name, value in env.items() if name in VARIABLES and value.isdecimal()}


def command_line(args: Mapping[str, Any]) -> str:
    """Return flags and environment variables as text for a shell, the variables first."""
    ordered = {**variables_in(args), **args}
    return " ".join(_option(name, value) for name, value in ordered.items())


def _option(name: str, value: Any) -> str:
    """Return a flag or variable as it is typed in a shell. The value None means that the flag is left out."""
    if name in VARIABLES:
        return f"{name}={value}"
    if value is None:
        return f"without --{name}"
    return f"--{name}" if value is True else f"--{name} {value}"


def installed(python: str | None = None, environ: Mapping[str, str] | None = None) -> Flags:
    """Return the flags of the SGLang that the interpreter `python` imports; unknown flags if it has none.

    `environ` is the job's `engine.env`. The first call runs `--help`, which takes about 6 s. The result is
    cached.
    """
    return _ask(python or sys.executable, tuple(sorted((environ or {}).items())))


def version_of(python: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the version of the SGLang that the interpreter `python` imports; None if it has no SGLang.

    `environ` is the job's `engine.env`.
    """
    from batchrunner.sglang.device import output_of, program_environment  # noqa: PLC0415 - few runs ask

    command = [python or sys.executable, "-c", _VERSION]
    return output_of(command, HELP_TIMEOUT_S, program_environment(environ)).strip() or None


def is_at_least(version: str | None, *least: int) -> bool:
    """Tell whether a version of SGLang, such as "0.5.23", is known and is at least `least`."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is not None and tuple(map(int, numbers.groups())) >= least


def of_arguments(version: str | None, arguments: Iterable[str]) -> Flags:
    """Return the flags of a server, from the names of its arguments in `/server_info` or in its log."""
    return Flags(version, frozenset(name.replace("_", "-") for name in arguments))


def parse_help(text: str, version: str | None = None) -> Flags:
    """Return the flags in the output of `python -m sglang.launch_server --help`."""
    options = [name.groups() for option in _OPTION.findall(text) for name in _NAME.finditer(option)]
    choices = {name: frozenset(values.split(",")) for name, values in options if values}
    return Flags(version, frozenset(name for name, _ in options), choices)


def spellings(name: str) -> tuple[str, ...]:
    """Return all names of a flag, the newest first."""
    return next((names for names in _SPELLINGS if name in names), (name,))


class StatePool(NamedTuple):
    """The pool of one scheduler for the states of a hybrid model. A state does not grow with its request."""

    slots: int
    """Number of state slots in the pool, `max_mamba_cache_size`."""
    per_request: int
    """Number of slots that a running request takes."""
    gb: float | None = None
    """Memory of the state pool in GB; None if unknown."""
    kv_gb: float | None = None
    """Memory in GB of the KV pool on the same GPU; None if unknown."""

    @property
    def most_running(self) -> int:
        """Maximum number of running requests whose states fit into the pool."""
        return self.slots // self.per_request


STATE_RATIO = 0.9
"""SGLang's default of `--mamba-full-memory-ratio`: memory of the state pool divided by memory of the KV
pool."""
_SLOTS = {"extra_buffer": 5, "extra_buffer_lazy": 4}
"""Number of state slots of a running request, by `--mamba-radix-cache-strategy`. It is 3 with any other
strategy, and 1 without a prefix cache (`_calculate_mamba_ratio` in SGLang's kv_cache_configurator.py)."""


def slots_per_request(arguments: Mapping[str, Any]) -> int:
    """Return the number of state slots that a running request takes, from a server's resolved arguments."""
    if arguments.get("disable_radix_cache"):
        return 1
    strategy = str(arguments.get("mamba_radix_cache_strategy"))
    # A strategy that is not in the table takes 3 slots.
    slots = _SLOTS.get(strategy, 3)
    # Without the overlap schedule, this strategy needs one slot less.
    if strategy == "extra_buffer" and arguments.get("disable_overlap_schedule"):
        slots -= 1
    return slots


@functools.cache
def _ask(python: str, environ: tuple[tuple[str, str], ...]) -> Flags:
    """Run SGLang's `--help` with an interpreter, and return the flags that it lists. The result is cached."""
    from batchrunner.sglang.device import has_gpu, output_of, program_environment  # noqa: PLC0415

    environment = program_environment(dict(environ), cpu=not has_gpu())
    help_text = output_of([python, "-m", "sglang.launch_server", "--help"], HELP_TIMEOUT_S, environment)
    return parse_help(help_text, version_of(python, dict(environ)))
