"""From the host to a device: device_feed copies batches beside training, through pinned_ring; nested finds tensors."""
