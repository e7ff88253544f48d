"""Estimates how long a job takes, before it runs.

`estimate` reads the input and lets the engine answer a sample. `job_time` simulates the other rows. `cold`
gives a rough range from data sheets, without an engine.
"""
