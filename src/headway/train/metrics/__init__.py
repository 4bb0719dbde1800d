"""Metrics: values on the device, one reduction per log point, rows, history, timing, and what people see."""
