"""The exit codes of every command (the table in docs/reference/exit_codes.md)."""

OK = 0
FAILED = 1  # the command could not do its work, or the run that it looked at has failed
BAD_INPUT = 2  # arguments, configuration or input files are wrong; nothing was written
SAVED = 75  # a signal ended the run after a checkpoint: the same command goes on (with checkpoint.resume=auto)
INTERRUPTED = 130  # by Ctrl-C, of a command that has nothing to save at its end
