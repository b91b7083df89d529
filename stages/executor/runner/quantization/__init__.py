"""Models with weights of codes: loading, from all formats, and writing."""
