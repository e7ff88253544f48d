"""The job that a user describes: its fields, their checks and their descriptions, and how it is read.

spec: `Job` and its parts. sampling: `SamplingSpec`, `FromColumn`. engine: one class per kind of engine.
load: `load_job`, `parse_engine`. fields: the base class and common field types. queue_band: `QueueBand`.
"""
