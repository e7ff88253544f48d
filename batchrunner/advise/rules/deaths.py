"""Rules on deaths that are not caused by GPU memory. Each is pure."""

from batchrunner.advise.rules.rule import Finding
from batchrunner.advise.situation import LONGEST_LINE, Situation
from batchrunner.engines.flags import Flags, command_line
from batchrunner.engines.recovery.diagnosis import Death
from batchrunner.engines.recovery.safer_args import safer


def killed(s: Situation, flags: Flags) -> Finding | None:
    """Find that a process was killed, as the kernel does when the host's memory runs out."""
    died = s.facts.died
    if died is None or not died.killed:
        return None
    args = safer(Death("killed", died.text), s.facts, flags)
    host = "more memory for it (the machine's, the container's or Slurm's --mem), if `dmesg` says `oom-kill`"
    if s.facts.arguments.get("enable_hierarchical_cache"):
        host += ", or a smaller --hicache-ratio"
    return Finding(
        f"killed (SIGKILL), as the kernel does when the host's memory runs out: {died.text[:LONGEST_LINE]}",
        args,
        ", or ".join(filter(None, (command_line(args), host))),
        {"line": died.text},
    )


def crashed(s: Situation, _: Flags) -> Finding | None:
    """Find that the server died of an error that no flag is known to cure."""
    died = s.facts.died
    if died is None or died.killed or s.facts.last_trouble:
        return None
    return Finding(
        f"the server died: {died.text[:LONGEST_LINE]}",
        change="look for that error in the log and among SGLang's issues: another release may not have it",
        evidence={"line": died.text},
    )
