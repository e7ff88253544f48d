"""Estimates the time and the cost of a job before it runs.

`estimate` reads the input and has the engine answer a sample of the rows. `job_time` simulates the other
rows. `cold` gives a rough range from data sheets, without an engine.
"""
