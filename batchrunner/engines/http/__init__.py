"""HTTP: requests to SGLang servers and gateways, and what their replies and failures mean.

A row passes through `client` (sends it), `wire` (writes its request) and `replies` (reads its answer).
`guard` tells which server answers. Others import `loads` (how a server is asked, and its load) and
`server_info` (what it says of itself).
"""
