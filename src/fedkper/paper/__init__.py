"""The paper's table and figures, from runs."""
