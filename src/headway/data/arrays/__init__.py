"""Large arrays in chunks: sharded indices, xarray datasets, and interleaved batches."""
