"""What people read: `estimate` computes every answer as a `Quantity` with interval, formula and source; tables print
it in a terminal, and `html` renders it as a page.
"""
