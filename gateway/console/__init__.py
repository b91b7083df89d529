"""The console: a page at `/console` that shows the pipeline and its requests."""
