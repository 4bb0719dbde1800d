"""The formulas: model states and activations add up to memory, rooflines and collectives to the time of a step with its
pipeline schedule, and `economy` covers checkpoints, failures and energy of a run. Nothing here prints or reads files.
"""
