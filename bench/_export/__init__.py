"""Parts of the export bench: faults and the gate, speed, serving, labels."""
