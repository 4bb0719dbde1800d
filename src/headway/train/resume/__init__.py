"""Resume: what a pipeline saves, when it saves, and how a run continues exactly."""
