"""The machine under us: durable files, locks, JSON lines, text, limits, environment, redaction, failpoints."""
