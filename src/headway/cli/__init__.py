"""The command line: verbs, their options and help, and how results and errors are printed.

In: the user's words. Out: a result on standard output, messages on standard error, an exit status. Read `main.py`
first; `training.py`, `study.py`, `examine.py` and `planning.py` hold other verbs, and `screen.py` prints.
"""
