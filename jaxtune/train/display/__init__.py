"""The output of a run. monitor.py makes each step's metrics and speeds, and stops a bad run; metrics.py writes and
reads metrics.jsonl, gives the metrics to other loggers, and has the progress bar and the plot of the loss. report.py
makes the texts and tables for the terminal.
run_figures.py reads the figures of a run's folder, run_page.py makes the HTML page that shows them (page.js, page.css),
and watch.py is a local server that keeps this page up to date for several runs."""
