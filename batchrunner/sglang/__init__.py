"""What can be known of SGLang without talking to a server: its flags by version, its models' files, its logs.

`flags` spells flags as a version has them. `device` knows this machine's GPUs, and what SGLang needs on a
CPU. `model_files` reads a model's directory. `logs` reads what a server logs.
"""
