"""The pages of docs/reference/, made from the code: `python -m docs.tools.reference` writes them."""
