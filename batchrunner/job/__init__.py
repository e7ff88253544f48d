"""Defines the job that a user describes: its fields with checks and descriptions, and its loading.

Fields: `spec` has the whole job (`Job`) and the sections `input`, `accept` and `limits`. `prompt`,
`sampling`, `output` and `engine` have the sections of these names. `fields` has their base class and the
types of fields.

Loading: `load` reads a job from YAML and `--set`. `call` makes the job of a library call or of `batchrun
batch`.

Derived from a job: `answers` (`AnswerPlan`) has the columns and checks of its answers. `python_functions`
starts its Python functions, which `hook_loading` imports. `tasks` has the tasks without decoding.
"""
