"""Feed: samples from storage to the device, in an order that is a pure function of (seed, epoch, position)."""
