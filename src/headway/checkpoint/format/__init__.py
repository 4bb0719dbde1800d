"""What a checkpoint is on disk: `directory` (where it is, reading without links), `manifest` (manifest.json and
index.json), `verification`, `tree` (a state as JSON beside its tensors), `tensor_file` (safetensors) and `dtypes`.
"""
