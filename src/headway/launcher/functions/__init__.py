"""A launched function: on its way to the ranks (`pickled`), called there (`worker`), and its job started (`start`)."""
