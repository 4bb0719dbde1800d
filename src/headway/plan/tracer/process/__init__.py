"""Tracing a user's module, in a process of its own: the only part of the plan room that imports torch.

Started as `python -m headway.plan.tracer.process` by `headway.plan.tracer.request`; some operations abort the
interpreter when they meet tensors that do not exist, and a planner must report that, not die of it.
"""
