"""Failures: the record of the first one, hangs and who causes them, heartbeats. Needs no torch."""
