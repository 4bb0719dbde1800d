"""Before: what will a run cost? Model and layout in, memory, time and money out. No torch at import."""
