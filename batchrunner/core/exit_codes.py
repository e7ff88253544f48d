"""Exit codes of the command."""

EXIT_DONE, EXIT_STOPPED, EXIT_WRONG, EXIT_FAILED_ROWS = 0, 1, 2, 3
EXIT_INTERRUPTED, EXIT_TIME_UP, EXIT_TERMINATED = 130, 138, 143
EXIT_MEANINGS = {
    EXIT_DONE: "All rows are done.",
    EXIT_STOPPED: "The run could not go on (engine lost, input gone, disk full, deadline): run it again to "
    "resume.",
    EXIT_WRONG: "The job, its input or the command is wrong; one line says what and where, and nothing was "
    "sent.",
    EXIT_FAILED_ROWS: "Done, but more rows failed than `limits.max_failed_rows` tolerates; after `check`, "
    "none of the rows that it rendered can be sent.",
    EXIT_INTERRUPTED: "Ctrl-C (SIGINT). Rows in flight end first; a second Ctrl-C stops at once. Run it "
    "again to resume.",
    EXIT_TIME_UP: "SIGUSR1: a time limit is near. Rows in flight have `limits.drain` to end. Run it again to "
    "resume.",
    EXIT_TERMINATED: "SIGTERM. Rows in flight have 15 s to end. Run it again to resume.",
}
"""Meanings of the exit codes of `batchrun`; those above 128 are 128 + the signal."""
