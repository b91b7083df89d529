"""LoRA adapters: several in one batch, over one model.

`peft` reads PEFT's folders and checks them against the model; `table` holds the loaded adapters
and adds their outputs to the layers' in a step.
"""
