"""Which layout is best: `search` tries all valid layouts and ranks those that fit; `find_remedies` finds the changes
that make one layout fit.
"""
