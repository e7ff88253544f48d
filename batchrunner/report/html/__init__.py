"""The page of a run, report.html: one file with all charts, tables and advice, without outside resources.

The steps: history.py reads the event logs and puts them on one time axis, results.py reads the parts,
charts.py draws, page.py fills the template. Others may import `write_page` (page.py).
"""
