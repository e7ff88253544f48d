"""What a run did: report.json, the lines at its end, the exit code, and the page report.html.

Others may import `Report`, `make_report`, `report_of_all` (report.py), `merge_run`
(merged.py), and `write_page` (html/page.py).
"""
