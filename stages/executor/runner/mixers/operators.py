"""The contract of operators that mix tokens through a recurrent state.

An operator computes a token from the state before it and the token alone, in one order of sums. So
a token has the same bits in a prompt, in a chunk of it, decoded, or replayed.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..state.segments import Segments


class Operators(Protocol):
    """Operators of one device. All arguments and results are contiguous.

    Attributes:
        code: A digest of compiled code; "" for torch's.

    `x`, `q`, `k`, `v`, `B` and `C` have the dtype of the activations. State tensors are float32,
    except for the window of a convolution, which has the dtype of its weight. Their rows are the
    slots that `segments` names, and the operators write to them in place.
    """

    code: str

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        window: Tensor,
        segments: Segments,
    ) -> Tensor:
        """Causal convolution of each channel over the last `width` tokens.

        Args:
            x: `[tokens, channels]`.
            weight: `[channels, width]`; the last column is the token's own.
            bias: `[channels]`.
            activation: Transformers' name of it; None for none.
            window: `[slots, width - 1, channels]`, the inputs before a segment, oldest first.
            segments: The segments.

        Returns:
            `[tokens, channels]`, rounded to the dtype of the weight before the activation.
        """
        ...

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        l2norm: bool,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        """Gated delta rule: S = exp(g) S; S += k (beta (v - k S)); y = scale q S.

        Args:
            q: `[tokens, k_heads, key_dim]`; each head serves `heads / k_heads` consecutive heads.
            k: Likewise.
            v: `[tokens, heads, value_dim]`.
            g: `[tokens, heads]` float32, logarithm of the decay; or `[tokens, heads, key_dim]`,
                one for each channel of the key.
            beta: `[tokens, heads]`.
            scale: Factor of the queries.
            l2norm: Divide q and k by sqrt(sum of squares + 1e-6) first.
            state: `[slots, heads, key_dim, value_dim]`.
            segments: The segments.

        Returns:
            `[tokens, heads, value_dim]` in the dtype of `q`.
        """
        ...

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        """Mamba-2: S = exp(dt A) S + (dt x) B; y = S C + D x.

        Args:
            x: `[tokens, heads, dim]`.
            dt: `[tokens, heads]`, after bias, softplus and limits.
            A: `[heads]` float32, negative.
            B: `[tokens, groups, n]`; each group serves `heads / groups` consecutive heads.
            C: Likewise.
            D: `[heads]`.
            state: `[slots, heads, n, dim]`.
            segments: The segments.

        Returns:
            `[tokens, heads, dim]` float32.
        """
        ...

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        """Mamba-1: S = exp(dt A) S + (dt x) B; y = S C + D x, for each channel.

        Args:
            x: `[tokens, channels]`.
            dt: `[tokens, channels]`, after bias and softplus.
            A: `[channels, n]` float32, negative.
            B: `[tokens, n]`.
            C: `[tokens, n]`.
            D: `[channels]` float32.
            state: `[slots, channels, n]`.
            segments: The segments.

        Returns:
            `[tokens, channels]` float32.
        """
        ...

    def lightning(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        state: Tensor,
        segments: Segments,
    ) -> Tensor:
        """Lightning attention: S = decay S + k v; y = q S.

        Args:
            q: `[tokens, heads, key_dim]`.
            k: Likewise.
            v: `[tokens, heads, value_dim]`.
            decay: `[heads]` float32, between 0 and 1.
            state: `[slots, heads, key_dim, value_dim]`.
            segments: The segments.

        Returns:
            `[tokens, heads, value_dim]` in the dtype of `q`.
        """
        ...
