"""Evaluation: the steps of a stage without training, in the loop or in a process of their own.

`mode` has the parts that validations in the loop and evaluations share: eval mode, averaged weights, batches of all
ranks. `session` chooses run and weights, `pause` keeps the state of training while a hook evaluates, and `evaluator`
computes metrics. `predictor` runs `predict` of a stage, `sample_order` describes its samples, and `output` writes the
file of predictions. `val_schedule` decides when the loop validates. `methods` has the methods of `Pipeline`.
"""
