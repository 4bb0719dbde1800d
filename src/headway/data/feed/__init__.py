"""Moves batches to a device: batch_mover chooses how, device_feed copies during training, nested finds tensors."""
