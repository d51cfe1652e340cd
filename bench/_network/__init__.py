"""Parts of bench.network: processes on several hosts that measure several ways to reduce, in turns."""
