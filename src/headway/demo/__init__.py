"""The tour of `headway demo`: a small training is killed and resumed, with the commands that a user would type.

`tour` runs them. `draw.py` and `train.py` are their scripts, which the tour copies to the demo's directory.
"""
