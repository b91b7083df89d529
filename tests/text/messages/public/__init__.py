"""llama.cpp's public templates and cases against the formats: `python -m …public CHECKOUT`."""
