"""Datasets by name: where their shards are, how many samples they hold, and stubs for editors."""
