"""Images on a GPU: availability (can it be used), pinned (memory for JPEGs), nvjpeg (decoding), image_table (where the
images are), kernels and gpu (cropping), device_batch (whole batches on streams).

kernels, gpu and device_batch need Triton, and are imported when a loader has a GPU.
"""
