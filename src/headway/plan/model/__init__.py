"""The model and its layout: `Transformer` with its exact parameter counts, well-known models as presets, models read
from a Hugging Face config.json, and `Layout`, the degrees of parallelism with batch and precision.
"""
