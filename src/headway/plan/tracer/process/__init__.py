"""The process that traces a user's module, without data or a device. Imports torch.

`headway.plan.tracer.request` starts it as `python -m headway.plan.tracer.process`: some operations abort the
interpreter when their tensors have no data, and the planner has to report that.
"""
