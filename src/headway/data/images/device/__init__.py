"""Images on a GPU: nvjpeg (decoding), kernels and gpu (cropping), device_batch (whole batches on streams).

All but nvjpeg need Triton, and are imported when a loader has a GPU.
"""
