"""Keep: state that survives. Storage, retention, stop requests, export."""
