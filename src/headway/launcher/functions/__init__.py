"""Functions as jobs: call a Python function on many processes and collect what it returns."""
