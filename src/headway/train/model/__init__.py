"""Models and their optimization: wrapping for many ranks, precision, averages, schedules.

`parallel` moves a model to its device and wraps it with DDP, FSDP2 or tensor parallelism; `ties` keeps tied parameters
tied, `tensor_group` checks what ranks that split a model hold whole, and `mesh_groups` groups tensors by device mesh,
where torch cannot mix them. `precision` sets up autocast and the loss scale, `ema` averages weights, `zero_grad` clears
gradients, `schedules` has learning-rate schedules, and `optimizer_step` clips, steps and skips.
"""
