"""The kinds of events in events.jsonl, with their fields: the source of docs/reference/events.md."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EventKind:
    """A kind of event: when it is written, and the fields that it has besides those of every event."""

    when: str
    fields: Mapping[str, str]


EVERY_EVENT = {
    "time": "Time of this machine's clock, in seconds since the epoch.",
    "elapsed_s": "Seconds since the attempt opened the log.",
    "event": "Name of the event.",
    "events_lost": "Events before this one that could not be written (a full disk); absent if there were "
    "none.",
}
"""Fields of every event."""

_SERVER = {
    "who": "Name of the server in log lines, or its address.",
    "why": "Reason, in a sentence; may be empty.",
}

EVENTS = {
    "start": EventKind(
        "An attempt begins: its engine is ready.",
        {
            "rows_total": "Rows that the task has to do, those of earlier attempts included.",
            "rows_done": "Rows that earlier attempts ended.",
            "engine": "Properties of the engine, as `engine` in report.json.",
            "args": "The job's `engine.args`.",
        },
    ),
    "order": EventKind(
        "The order of sending is decided.",
        {
            "order": "`input`, `prefix` or `longest_first`.",
            "why": "Reason, in words.",
            "rows_sampled": "Rows that were read for the decision.",
            "input_share": "Fraction of prompt bytes that the prefix cache would hold in input order, 0 "
            "to 1; "
            "null without a sample.",
            "sorted_share": "The same for sorted rows.",
            "input_equal": "Fraction of rows that get the answer of an equal row in input order.",
            "sorted_equal": "The same for sorted rows.",
            "prompt_bytes": "Bytes of a prompt on average, 4 for a token id; null without a sample.",
        },
    ),
    "tokenize": EventKind(
        "It is decided where prompts are tokenized.",
        {
            "where": "`client` or `server`.",
            "why": "Reason, where it is the server.",
            "engine_has_tokenizer": "Whether the server has a tokenizer too, where it is the client.",
        },
    ),
    "window": EventKind(
        "The number of requests in flight changes for a scheduler.",
        {
            "scheduler": "Address of the replica, with `#dpN` where it has several data-parallel ranks.",
            "old": "Window before, in requests; 0 at the start.",
            "new": "Window now, in requests.",
            "state": "State of the controller: `start`, `steady`, `settled`, `pressure`, `blind` or `tail`.",
            "reason": "Reason, with figures.",
        },
    ),
    "corner": EventKind(
        "A scheduler comes into another corner, by its waiting requests and its token usage.",
        {
            "scheduler": "Address of the replica, with `#dpN` where it has several data-parallel ranks.",
            "corner": "`short`, `full`, `good`, `filling` or `held`: see "
            "[adaptive concurrency](../how-it-works/concurrency.md#token-usage).",
            "queue": "Waiting requests.",
            "token_usage": "Fraction of the KV pool in use, 0 to 1.",
            "reason": "Reason, with figures, and what follows from it.",
        },
    ),
    "conservativeness": EventKind(
        "Launched servers are to admit more requests from their next start on, since they hold them back.",
        {"new": "Value of `--schedule-conservativeness` at the next start and in the next run."},
    ),
    "lead": EventKind(
        "The reuse distance changes: how far a row that computes a prefix runs ahead of its followers.",
        {
            "old": "Distance before, in prefill tokens.",
            "new": "Distance now.",
            "reason": "Reason, with figures.",
        },
    ),
    "sample": EventKind(
        "The state of the run, every 2 s and at the end.",
        {
            "rows_total": "Rows that the task has to do; an estimate where tasks share the rows.",
            "rows_done": "Rows that ended in this and earlier attempts, failed ones included.",
            "rows_failed": "Rows that ended with an `error`.",
            "rows_per_s": "Rows per second, over the last 30 s.",
            "output_tokens_per_s": "Generated tokens per second, over the last 30 s.",
            "prompt_tokens_per_s": "Prompt tokens per second, over the last 30 s.",
            "cached_tokens_per_s": "Prompt tokens per second that came from the prefix cache.",
            "output_tokens": "Generated tokens of this attempt so far.",
            "prompt_tokens": "Prompt tokens of this attempt so far.",
            "cached_tokens": "Those of them that came from the prefix cache.",
            "rows_per_request": "Rows that shared a request on average, over the last 30 s; 0 before the "
            "first request.",
            "window": "Most rows in flight, over all replicas.",
            "in_flight": "Rows in flight.",
            "resting": "Rows that wait for another try.",
            "retractions": "Retractions of this attempt so far.",
            "signals": "Load of each scheduler: `running` and `queue` in requests, `token_usage` from 0 "
            "to 1, "
            "`window`, `corner` (absent if in none), and where they were read (`source`).",
            "bands": "Healthy number of waiting requests of each scheduler: [low, high].",
            "task": "`task` of the job.",
        },
    ),
    "bundles_off": EventKind(
        "Rows that could share requests do not, or no longer.",
        {"route": "Address that the rows are sent to.", "why": "Reason, in words."},
    ),
    "lease": EventKind(
        "A task of several takes rows.",
        {
            "lease": "Number of the lease.",
            "turn": "Number of tasks that held it before.",
            "rows": "Number of its rows.",
        },
    ),
    "lease_end": EventKind(
        "A task returns a lease, done or not.",
        {"lease": "Number of the lease.", "rows_left": "Rows that are left for other tasks."},
    ),
    "takeover": EventKind(
        "A task takes over the rows of a task that died.",
        {
            "task": "Name of the task that died.",
            "leases": "Numbers of its leases.",
            "rows_left": "Rows that it had not done.",
        },
    ),
    "engine_recalled": EventKind(
        "A server starts with the safer arguments that an earlier run found.",
        {**_SERVER, "new": "Arguments that it starts with."},
    ),
    "engine_died": EventKind("A server ended by itself.", _SERVER),
    "engine_healed": EventKind(
        "A server that ran out of memory is started again with safer arguments.",
        {
            **_SERVER,
            "kind": "Where memory ran out: `load`, `pool`, `graph`, `prefill-graph`, `prefill`, `decode`, "
            "`requests` or `general`; or `killed`, by the kernel.",
            "old": "Arguments before.",
            "new": "Arguments now.",
        },
    ),
    "engine_hangs": EventKind("A server made no progress for too long.", _SERVER),
    "engine_back": EventKind("A server answers again.", _SERVER),
    "engine_lost": EventKind("A server is not started again: it died too often.", _SERVER),
    "engine_out": EventKind("A replica is removed from the gateway's list of workers.", _SERVER),
    "engine_in": EventKind("A replica is added to the gateway's list of workers again.", _SERVER),
    "end": EventKind(
        "An attempt ends; absent if it was killed.",
        {"exit_code": "Exit code of the command.", "reason": "Why it ended, in a sentence."},
    ),
}
"""Kinds of events by name, in the order in which a run writes them first."""
