"""Tools for datasets: check shards, find duplicates, measure loading speed."""
