"""Networks of the decks that `headway.model` does not have: for the benches alone, with random weights."""
