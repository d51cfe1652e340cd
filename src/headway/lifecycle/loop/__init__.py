"""The loop: train members, mine, wait for labels, train again, and export what is not worse."""
