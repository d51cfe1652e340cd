"""Parts of `python -m bench.lifecycle`, one a file."""
