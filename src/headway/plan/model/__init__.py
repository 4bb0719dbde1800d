"""What is trained: transformers and their presets, and the layout that spreads them over devices."""
