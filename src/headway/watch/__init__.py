"""Look: what people see. Terminal monitor, web page, report, list of runs. No torch at import."""
