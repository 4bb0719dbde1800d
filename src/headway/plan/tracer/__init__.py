"""Any `nn.Module`: `trace` estimates it without a GPU, `measure` compares the estimate with real steps, `calibrate`
measures the machine. The sub-packages `process` and `probe` are the processes in which user code runs; only they
import torch.
"""
