"""`headway serve`: answers predictions of an export over HTTP."""
