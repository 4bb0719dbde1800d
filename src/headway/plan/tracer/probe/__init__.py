"""The process that measures on this machine's device: `python -m headway.plan.tracer.probe OUT`. Imports torch."""
