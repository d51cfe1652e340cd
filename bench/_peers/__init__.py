"""Contestants of the benches: each a process of its own that waits for `go` (see serve.py)."""
