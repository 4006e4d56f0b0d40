"""The output of a run: its metrics and where they are recorded (metrics.py, monitor.py), what it prints on the
terminal (report.py), and its HTML page (run_figures.py, run_page.py, watch.py)."""
