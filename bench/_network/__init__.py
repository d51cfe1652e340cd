"""What bench.network measures with: processes on several hosts that take turns with several ways to reduce."""
