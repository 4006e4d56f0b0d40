"""The model of a run and its compiled programs, run under a plan that fits."""
