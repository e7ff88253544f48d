"""batchrunner: offline batch inference that keeps an SGLang engine at its highest throughput.

The way of a row: job → dataset → plan → gate → engine → outcome → sink → parts → report.

The map; a file imports only from lines above its own (this one excepted), and a test says so:

    errors           every error, a sentence each
    records          the frozen records that pass between stages
    job              the job: what to run, on what, with which engine
    jobfile          YAML, environment, --set → job
    jsonfile         JSON files that others wrote
    templates        Jinja2 in a sandbox
    chattemplate     a model's own chat template, in another sandbox
    detokens         token ids → the text that SGLang makes of them
    room             how long a prompt may be, and how one is cut
    tokens           prompts → token ids, as SGLang makes them
    rows             sets of rows, by their ordinals
    deal             rows → the order of a column of theirs, in bounded memory
    discover         input paths → files, and the columns that stand in their paths
    dataset          Parquet → rows with stable ordinals
    prompt           rows → requests
    prefixes         what prompts have in common at their beginning
    order            rows in the order in which they are sent: as they stand, or a sorted copy
    shard            what one of several tasks does
    plan             which rows are sent, and in which leases
    gate             the in-flight windows, resizable
    window           how wide a window is at the start
    controller       the window of one scheduler, moved by its own load
    sharing          what is left, parted between the replicas
    admission        a controller a scheduler → the windows of the routes
    retry            pure: a failed try → again after s, or give up
    storage          the run directory, atomic writes
    engines.base     the protocol that every engine speaks
    engines.sockets  how many connections this machine lets us hold
    engines.signals  what a server says of its load → Signals
    engines.batchlines  one line of its log, of any release
    engines.loglines   its load out of such lines
    engines.wire     requests and replies as SGLang's HTTP interface has them
    engines.model    a model's name and whether it is there
    engines.tokenizing  how a server says that it makes tokens
    engines.device   GPU or CPU, and what SGLang needs for a CPU
    engines.deadline   one timer for all requests
    engines.hang     when a server does nothing for too long
    engines.route    where requests are sent
    engines.blame    why a row was cut off
    engines.http     the client of one or more servers
    engines.workerlist  what a gateway passes rows on to
    engines.gateway  a gateway that runs already
    engines.attached   servers that run already
    engines.serverlog  why an engine died, from its log
    engines.launcher   a script of its own: runs a server that cannot outlive us
    engines.process  a program that we start, through the launcher
    engines.guard    starts a program again that dies
    care.flags       which flags a version of SGLang has, and how it spells them
    care.thresholds  where signs begin
    care.signs       what one look at a scheduler can be a sign of
    care.series      looks over time, counted
    care.facts       what is known of a server beside its load
    care.logfile     a log of any size → series and facts
    care.host        this machine's memory, and what the kernel killed for want of it
    care.death       why an engine died
    care.safer       a death → safer arguments
    care.remembered  what worked, for the next run
    care.fits        whether the weights fit
    care.healer      deaths → the arguments of the next start and the next run
    engines.launched   one SGLang server as such a program
    engines.server   a server that we start
    engines.router   one gateway as such a program
    engines.fleet    replicas and a gateway that we start
    engines.inprocess  sglang.Engine in this process
    simulation.radix   which prefixes are cached, and what is evicted
    simulation.sample  one request as the simulated scheduler sees it
    simulation.running  the samples that decode together, as sums
    simulation.budget  what one admission pass may still take
    simulation.scheduler  SGLang's scheduler without clock or model
    simulation.cost    how long a forward pass takes
    simulation.replica  a scheduler on a virtual clock, with stale gauges
    engines.simulated  no engine: made-up answers
    engines.registry   the job's `engine` → an engine
    care.advice      what a rule has to say
    care.situation   all that rules look at, and what they find
    care.load_rules    rules on queue, token usage and retractions
    care.pass_rules    rules on prefill and CUDA graphs
    care.memory_rules  rules on memory
    care.death_rules   rules on deaths that it does not explain
    care.setup_rules   rules on what was chosen before the start
    care.rule        one row of the table of rules
    care.rules       the table
    care.live        a live server → the same
    care.limit       what a card could do at most
    claim            its one writer: who it is, whether it lives
    journal          finished rows, durable long before their part is
    disk             a disk that takes nothing is waited for
    tally            what became of the rows, in numbers
    columns          outcomes → Arrow
    parts            written whole, in place of journals; read, or refused
    sink             outcomes → journal → parts
    checkpoint       what is durable, and of which job
    keysort          the keys of any number of rows, sorted on disk
    leases           ranges of rows that tasks take: free, held or done
    takeover         what dead tasks left
    merge            parts → one dataset in input order
    events           the run's story as JSON lines
    report           the account of a run
    progress         what is shown while it goes on
    control          how a run is stopped from outside
    prepare          what is checked and read before an engine is needed
    gain             what sorting would gain, from a sample
    work             a row on its way to the engine
    lengths          how long an output will be
    sort             writes a sorted copy
    ordering         which order a start takes
    clientside       tokens are made here, where that comes to the same
    source           where a start's rows come from: its own, or leases
    join             the plan of a run that several tasks do
    begin            what a start has before it
    account          tally → report, verdict and exit code
    suspects         rows that an engine had when it died
    families         which row goes before which
    lead             how far leaders go ahead, corrected by what the cache holds
    pace             when a row may follow its leader
    arrange          the order within a window of rows
    ready            rows that wait for a place, each for its route
    submit           requests → engine → outcomes
    summary          what the report says of the load
    feedback         polls the load, shows it, writes it down
    status           what a run is at, from its files
    care.ofrun       a run's directory → the same
    care.advise      a log, a server or a run → advice
    htmlreport.story     a task's events → its load over time, thinned
    htmlreport.timeline  several tasks' stories on one grid
    htmlreport.charts    lines and counts → what a chart is drawn of
    htmlreport.results   parts → sums, histograms, failures, the slowest rows
    htmlreport.share     what share of the cards' limit was reached
    htmlreport.headline  how it stands, and its figures
    htmlreport.loadcharts  which charts of the load there are
    htmlreport.page      all of it → report.html
    runner           one run from start to end: puts the parts together
    check            what a run would do
    foreground       a run with signals and a display
    slurm            a job as a Slurm array
    library          run, arun, generate, open_engine
    care.tune.measure  what a trial shows, and when it cannot win
    care.tune.race   which of two settings is faster
    care.tune.space  which flags are tried, and when
    care.tune.search   which trial comes next
    care.tune.history  the trials that were finished
    care.tune.outcome  what tuning came to
    care.tune.edit   engine.args into a job file
    care.tune.sample   the rows of the trials
    care.tune.logwork  what a trial's log says of its passes
    care.tune.trial  a server, the sample, what it showed
    care.tune.machine  what there is to tune on
    care.tune.tuner  trials within a time
    cli              the command
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchrunner.api import OpenEngine, arun, generate, open_engine, run
    from batchrunner.core.errors import (
        BatchrunError,
        EngineLostError,
        EngineStartError,
        InputError,
        JobError,
        OutputError,
        ResumeError,
        StorageError,
    )
    from batchrunner.job.spec import Job
    from batchrunner.report.report import Report

    __version__: str

__all__ = [
    "BatchrunError",
    "EngineLostError",
    "EngineStartError",
    "InputError",
    "Job",
    "JobError",
    "OpenEngine",
    "OutputError",
    "Report",
    "ResumeError",
    "StorageError",
    "__version__",
    "arun",
    "generate",
    "open_engine",
    "run",
]

_HOMES = {
    "Job": "job.spec",
    "OpenEngine": "api",
    "Report": "report.report",
    "arun": "api",
    "generate": "api",
    "open_engine": "api",
    "run": "api",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import batchrunner` stays instant."""
    if name not in __all__:
        raise AttributeError(f"module 'batchrunner' has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("batchrunner")
    from importlib import import_module  # noqa: PLC0415

    return getattr(import_module(f"batchrunner.{_HOMES.get(name, 'core.errors')}"), name)


def __dir__() -> list[str]:
    """Name what is public."""
    return __all__
