"""Measuring on the device here, in a process of its own: `python -m headway.plan.probe OUT`. Imports torch."""
