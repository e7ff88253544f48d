"""A run as a page: its events and results → series and figures → one HTML file."""
