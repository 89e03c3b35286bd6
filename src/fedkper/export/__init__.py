"""Numbers and models out of a run, and answers of a model."""
