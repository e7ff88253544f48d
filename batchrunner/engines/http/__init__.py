"""HTTP: requests to SGLang servers and gateways, and what their replies and failures mean.

A row passes through `client` (sends it), `wire` (writes its request) and `replies` (reads its answer).
`server` holds all that is known of one server, and `guard` compares its model with the run's. Other packages
import `server_info`: what a server says of itself, and its load.
"""
