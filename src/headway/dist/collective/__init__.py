"""The operations that ranks carry out together: exchanges of values, guarded sections, and averages.

`RankExchange` moves small JSON values between ranks, and `gather_rows` moves rows of numbers. Guarded sections let one
rank work while the others wait (`root_first`, `root_only`, `from_root`, `barrier`). Averages are for loops without
DistributedDataParallel. Names are loaded, and torch with them, on first use.
"""
