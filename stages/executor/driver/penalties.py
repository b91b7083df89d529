"""What changes logits before the temperature: penalties, bias, and stop tokens kept out.

Pure functions over padded matrices of token ids. Each returns new logits; minus infinity stays so.
None needs a count of every token of the vocabulary: repetition and presence set the same value
however often a token comes, and frequency adds once for each time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_repetition_penalty(logits: Tensor, token_ids: Tensor, penalties: Tensor) -> Tensor:
    """Divides positive logits of these tokens by the penalty and multiplies negative ones.

    Keskar et al., "CTRL: a conditional transformer language model", 2019, as Transformers has it.

    Args:
        logits: `[batch, vocab]` float32.
        token_ids: `[batch, k]` int64, padded by repeating any of the row's own.
        penalties: `[batch]`, above 0; 1 changes nothing.
    """
    penalties = penalties[:, None]
    values = logits.gather(1, token_ids)
    return logits.scatter(
        1, token_ids, torch.where(values < 0, values * penalties, values / penalties)
    )


def apply_presence_penalty(
    logits: Tensor, token_ids: Tensor, valid: Tensor, penalties: Tensor
) -> Tensor:
    """Subtracts the penalty from the logit of each of these tokens, once.

    Args:
        logits: `[batch, vocab]` float32.
        token_ids: `[batch, k]` int64; padding repeats the row's first.
        valid: `[batch, k]`, false for padding. A row may be all padding.
        penalties: `[batch]`; 0 changes nothing.
    """
    # Padding repeats a token of the row's, and must write what that one writes: so the row counts
    # as a whole or, when nothing in it is valid, not at all.
    penalties = torch.where(valid.any(dim=-1), penalties, 0.0)[:, None]
    return logits.scatter(1, token_ids, logits.gather(1, token_ids) - penalties)


def apply_frequency_penalty(
    logits: Tensor, token_ids: Tensor, valid: Tensor, penalties: Tensor
) -> Tensor:
    """Subtracts the penalty from the logits of these tokens as often as each occurs.

    Arguments as for `apply_presence_penalty`.
    """
    # Equal numbers are added to one place, so the order, which a GPU leaves open, has no effect.
    return logits.scatter_add(1, token_ids, torch.where(valid, -penalties[:, None], 0.0))


def apply_logit_bias(logits: Tensor, token_ids: Tensor, biases: Tensor) -> Tensor:
    """Adds a bias to each of these tokens.

    Args:
        logits: `[batch, vocab]` float32.
        token_ids: `[batch, k]` int64, each at most once in a row but for padding.
        biases: `[batch, k]` float32, 0 for padding.
    """
    return logits.scatter_add(1, token_ids, biases)


def mask_tokens(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Makes these tokens impossible.

    Args:
        logits: `[batch, vocab]` float32.
        token_ids: `[batch, k]` int64, padded by repeating any of the row's own.
    """
    return logits.scatter(1, token_ids, float("-inf"))
