"""What is shown of a run: its report in the terminal, and the HTML page of runs."""
