"""What a run did: report.json, the lines at its end, the exit code, and the page report.html.

Others may import `Report`, the exit codes and `duration` (report.py), `make_report` and `report_of_all`
(totals.py), and `write_page` (html/page.py).
"""
