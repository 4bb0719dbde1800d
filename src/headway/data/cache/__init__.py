"""The node cache: one copy of each shard per node for all processes, and staging to a node's own disk."""
