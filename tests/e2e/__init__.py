"""Tests of whole runs: the command, the library, failures and deaths, real engines, Slurm and a browser."""
