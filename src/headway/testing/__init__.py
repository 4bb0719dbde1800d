"""Prove: tools for our tests and for those of our users."""
