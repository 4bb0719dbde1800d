"""Tell: what a run writes. Rank logs, diagnostics, metric rows."""
