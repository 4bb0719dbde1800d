"""Weights of a model, from wherever they are: a run, a checkpoint, safetensors, Hugging Face, a torch file.

`source` names and finds them, `readers` opens them as named tensors that are read when they are needed, and `loading`
matches their names with those of a model and says what did not match.
"""
