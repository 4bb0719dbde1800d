"""Evaluation: the steps of a stage without training, in the loop or in a process of their own.

`mode` is what a validation in the loop and an evaluation share: eval mode, averaged weights, batches of all ranks.
"""
