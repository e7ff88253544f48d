"""Facts about SGLang that need no running server: flags by version, files of models, logs of servers.

`flags` spells flags as a version has them. `device` finds this machine's GPUs, and has the arguments that
SGLang needs on a CPU. `model_files` reads a model's directory. `logs` reads the logs of servers.
"""
