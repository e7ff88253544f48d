"""Commands that make what is generated in docs/: pages of reference and pictures; `make help` names them."""
