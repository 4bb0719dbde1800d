"""Measuring on the device here, in a process of its own: `python -m headway.plan.tracer.probe OUT`. Imports torch."""
