"""A launched function: `pickled` for the ranks, called by a `worker` on each, and started in the `background`."""
