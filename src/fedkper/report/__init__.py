"""The report on runs: one HTML file that a reader opens in a browser, without a network and without code."""
