"""HTTP: requests to SGLang servers and gateways, and the meaning of their replies and failures.

`client` sends a row, `wire` writes its request, and `replies` reads its answer. `server` has the client's
state of one server, and `guard` compares the server's model with the run's. Other packages import
`server_info`, which reads what a server reports about itself, and its load.
"""
