"""Plans of any `nn.Module`: `trace` estimates it without a GPU, `measure` compares the estimate with real steps, and
`calibrate` measures the machine. User code runs in processes of its own, the sub-packages `process` and `probe`; only
they import torch.
"""
