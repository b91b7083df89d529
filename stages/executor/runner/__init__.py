"""The model runner: step inputs to logits or hidden states. Owns model, KV memory, weights."""
