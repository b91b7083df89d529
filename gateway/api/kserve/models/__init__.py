"""The models that each engine model offers: text, tokens, score, embed and best_of."""
