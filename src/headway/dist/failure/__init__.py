"""Failures: what is recorded about the first one, and how a run that hangs is detected.

`capture` turns an exception into a record, `record` formats it for people, `remote` moves exceptions between ranks.
`heartbeat` shows whether a rank makes progress, and `hang` distinguishes ranks that hold up a run from those that wait;
`exit_deadline` ends a process in bounded time. Nothing here needs torch: node agents use it, too. How a rank reacts to
a failure is in `dist.control.failure_handler`.
"""
