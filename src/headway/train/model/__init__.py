"""Models and their optimization: wrapping for many ranks, precision, averages, schedules.

`parallel` moves a model to its device and wraps it with DDP, FSDP2 or tensor parallelism; `ties` keeps tied parameters
tied, `tensor_group` checks parameters that tensor parallelism leaves whole, and `mesh_groups` groups tensors by device
mesh, where torch cannot mix them. `precision` sets up autocast and the loss scale, `ema` averages weights, `zero_grad`
clears gradients, `schedules` has learning-rate schedules, `losses` checks and averages the losses of steps, and
`optimizer_step` clips, steps and skips.
"""
