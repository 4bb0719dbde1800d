"""The node agent: a plain process without torch that starts the ranks of a node and supervises them.

`agent.Agent` runs them, each a `process` with its `environment`; `watchdog` finds ranks that hang. `node` determines
which of several agents this one is. `team` is one agent's view of all agents, which `team_watch` watches, and
`launch_records` are the files through which they and the job's script exchange facts. `outcome` describes how a launch
ended, and `step_outcome` reads that from the records of a job. `scratch` is the temporary directory of an agent.
"""
