"""What users do every day: the arms of bench.everyday."""
