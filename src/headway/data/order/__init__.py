"""The order of samples: a pure function of seed, epoch and position, cut into the batches of all ranks."""
