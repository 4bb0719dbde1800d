"""Inspecting a checkpoint, or files of other tools, without executing anything in them.

`overview` is the entry point, `foreign` and `opcodes` read pickles as data, `tables` groups tensors by module, and
`exporter` writes plain safetensors.
"""
