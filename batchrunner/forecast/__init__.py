"""How long a job takes, before it runs.

`estimate` reads the input and has a sample answered; `job_time` simulates the rest; `cold` asks no engine.
"""
