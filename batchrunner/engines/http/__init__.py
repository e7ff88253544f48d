"""HTTP: requests to SGLang servers and gateways, and what their replies and failures mean.

Others import `loads` (how a server is asked, and its load) and `server_info` (how it describes itself). The
other files are for engines: `client` sends, `wire` writes requests, `replies` and `failures` read answers.
"""
