"""The code of a run as it was when it was submitted: a copy (`snapshot`) of the files that matter (`project_files`)."""
