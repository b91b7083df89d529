"""The model runner: step inputs to logits or hidden states. Owns model, KV memory, weights."""

from ....text.transformers_models import import_models

import_models()
