"""The pytest plugin: `@headway.testing.ranks(n)` runs a test on n real processes."""
