"""The node agent: a plain process without torch that starts the ranks of a node and supervises them.

`agent.Agent` runs them, `node` finds out which of several agents this one is, `team` is what they know of each other,
and `outcome` is how it all ended.
"""
