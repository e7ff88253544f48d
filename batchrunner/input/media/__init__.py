"""Images, audio and videos of prompts.

They come from columns (`columns`) into prompts (`prompts`), as files that are sent (`prepare`).

`prepare` runs in the processes of a job's Python functions: a broken file ends none but such a process.
"""
