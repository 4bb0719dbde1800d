"""Input files: plan files in YAML, and dlcalc files, which are converted to plan files."""
