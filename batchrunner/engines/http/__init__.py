"""HTTP: requests to SGLang servers and gateways, and what their replies and failures mean.

Others import `wire` (requests), `replies` (answers), `reply_errors`, `status` (ServerStatus) and
`server_info` (how a server describes itself). The other files are for engines.
"""
