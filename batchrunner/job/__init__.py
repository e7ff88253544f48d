"""The job that a user describes: its fields, their checks and their descriptions, and how it is read.

Fields: spec (`Job`), and its parts input, prompt, sampling (`SamplingSpec`, `FromColumn`), output (also the
columns of results), check, engine (one class for each kind) and queue_band; fields has the base class and
common types. Reading: load (`load_job`, `parse_engine`), call (the job of a call of the library), batch_call
(that of `batchrun batch`), yaml_text. Of a job: answers (`AnswerPlan`: columns and checks of its answers) and
python_functions (`open_functions`). Tasks without decoding: tasks.
"""
