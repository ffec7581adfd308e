"""A small GPT, as a script would write it: 21 M parameters, pre-norm blocks, tied embeddings."""

# ruff: noqa: D102  forward

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812  torch's own custom
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS = 8192, 384, 10, 6, 64


class Block(nn.Module):
    """Attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(rows, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, tokens, WIDTH))
        changed: Tensor = x + self.mlp(self.mlp_norm(x))
        return changed


class GPT(nn.Module):
    """Return the loss of the next token, for rows of TOKENS + 1 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.blocks(self.tokens(rows[:, :-1]) + self.positions.weight)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
