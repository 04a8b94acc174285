"""Every claim about normalization, measured on this repository's own code: see tools/claims/__main__.py."""
