"""Check: is this machine fit to train? Checks, probes and a canary job. No torch at import."""
