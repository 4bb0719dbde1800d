"""From the host to a device: batch_mover chooses how, device_feed copies beside training, nested finds tensors."""
