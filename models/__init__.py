"""Models that come with the package, and the scripts that made them."""
