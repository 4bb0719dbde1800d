"""Results: `estimate` computes every answer as a `Quantity` with interval, formula and source; `tables` prints an
estimate in a terminal, and `html` renders it as a page.
"""
