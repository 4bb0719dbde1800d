"""What ranks do together.

`RankExchange` moves small JSON values between ranks, `gather_rows` rows of numbers. Guarded sections let one rank work
while the others wait (`root_first`, `root_only`, `from_root`, `barrier`). Averages are for loops without
DistributedDataParallel. Names are loaded, and torch with them, on first use.
"""
