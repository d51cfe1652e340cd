"""Parts of bench.doctor: random cases and their environment, their measurement, the table."""
