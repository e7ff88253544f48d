"""Signals that end a run, and which the processes that it starts must not take."""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run. Slurm, systemd and `timeout` send them to all of its processes, but only the run
takes them: it waits for its rows in flight, which need those processes."""
