"""Many experiments: on this machine or on a Ray cluster."""
