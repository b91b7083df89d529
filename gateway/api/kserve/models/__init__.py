"""The models that a lane offers: by text, by token ids, scores, and the best of several samples."""
