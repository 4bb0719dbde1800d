"""What it runs on: devices and nodes from a catalog (`catalog.yaml`) or described by the user, and `Calibration`, the
constants that say which fraction of its peak a device or link reaches.
"""
