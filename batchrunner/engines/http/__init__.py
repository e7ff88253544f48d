"""HTTP: requests to SGLang servers and gateways, and what their replies and failures mean.

Others import `wire` (bodies and replies), `status` (ServerStatus) and `server_info` (what a server says of
itself). `client`, `endpoint`, `failures`, `connections` and `worker_list` are for engines.
"""
