"""Recovery: why a server died, and with which arguments the next start needs less memory.

Others import `safer_args` (safer, in_effect), `diagnosis` (Death) and `host` (the machine's memory). The
`healer` is for launched engines.
"""
