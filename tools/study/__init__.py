"""A grid of training runs in one command, and what it gives: a table with spread over seeds, curves, a page."""
