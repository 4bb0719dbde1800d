"""From a shard to a batch: what the threads of a `ShardLoader` do.

`loader_threads` starts them. Some read samples in chunks, decode and transform them (`sample_reader`, and `cropper`
for images); one gathers the chunks of a batch, and one joins them (`assembly`), by default as `collate` does.
"""
