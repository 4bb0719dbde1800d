"""The datasets of a mix and their shards while they are open."""
