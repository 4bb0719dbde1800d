"""A launched function: on its way to the ranks (`pickled`), called there (`worker`), started in the `background`."""
