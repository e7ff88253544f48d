"""The page of a run, report.html: one file with all charts, tables and advice, without external resources.

history.py reads the event logs and puts them on one time axis. results.py reads the result files. charts.py
draws the charts, and page.py fills the template. Other folders may import `write_page` (page.py), and
`page_style` and `source_hash` (style.py).
"""
