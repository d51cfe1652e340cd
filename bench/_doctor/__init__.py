"""What bench.doctor is made of: cases drawn by chance, what surrounds them, their measurement, the table."""
