"""What it runs on: devices and nodes as data, and calibration constants."""
