"""The format of a checkpoint on disk: manifest, state tree, tensor files. Needs no torch."""
