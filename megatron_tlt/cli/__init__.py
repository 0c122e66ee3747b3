"""The command line: the parser and exit codes in `main`, and one module a command."""
