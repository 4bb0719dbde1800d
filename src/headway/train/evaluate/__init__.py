"""Evaluation: the steps of a stage without training, in the loop or in a process of their own.

`mode` is what a validation in the loop and an evaluation share: eval mode, averaged weights, batches of all ranks.
`session` chooses run and weights, `pause` keeps a training as it is whose hook evaluates, `evaluator` computes metrics,
`predictor` what `predict` of a stage returns, `sample_order` knows the samples that it is called for, and `output` is
the file that predictions are written to.
`val_schedule` says when a validation is due in the loop. `methods` are those of `Pipeline` that start them.
"""
