"""Plans: what machines would give before they are rented, and what a room for them takes. Pure functions, no torch."""
