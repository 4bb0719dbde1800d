"""The node agent: a plain process without torch that starts the ranks of a node and supervises them.

`agent.Agent` runs them, each a `process` with its `environment`; `watchdog` finds ranks that hang. `node` finds out
which of several agents this one is, `team` is what they know of each other, `launch_records` what they leave for others
to read, `outcome` how it all ended. `scratch` is the private directory of an agent.
"""
