"""The shard format: tar files in the WebDataset layout, their indexes, checksums, decoders, and how to pack them."""
