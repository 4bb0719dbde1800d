"""The tour of `headway demo`: a small training that is killed and resumed, by the commands that a user would type.

`tour` runs them. `draw.py` and `train.py` are the scripts that they run: copied to the demo's directory, to be read.
"""
