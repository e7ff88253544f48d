"""The report of a run: report.json, the lines at its end, the exit code, and the page report.html.

Other folders may import `Report`, `make_report` and `report_of_all` (report.py), `verdict_of` (verdict.py),
`merge_run` (merged.py), and `write_page` (html/page.py).
"""
