"""Which layout is best: the search over valid layouts, and suggestions when a plan does not fit."""
