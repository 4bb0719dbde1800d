"""Shows runs to people: `select` and `summarize` list them (`headway runs`), `compare` shows them side by side, and
`samples_of` finds the samples of a step. `view` reads one run, `terminal` shows it live, `report` writes it as a page;
`housekeeping` removes and archives runs. Everything is read from run directories, without torch.
"""
