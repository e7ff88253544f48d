"""The job that a user describes: its fields with their checks and descriptions, and how a job is read.

Fields: spec (`Job`, `InputSpec`, `AcceptSpec`), and its parts prompt (with images, audio, videos and PDF
documents), sampling, output (with storage) and engine; fields has the base class and common types. Reading:
load (YAML, `--set`), call (the job of a call of the library, or of `batchrun batch`). Of a
job: answers (`AnswerPlan`: columns and checks of its answers), python_functions (`open_functions`). Tasks
without decoding: tasks.
"""
