"""A small transformer in training, or in inference: a script for `kagent hotspots` and `patch`.

python benchmarks/small_transformer.py --steps 20 [--infer] [--device cuda] [--compile]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention with its softmax written out, and an MLP with the tanh form of GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of [batch, length, width]."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in parts)
        p = F.softmax(q @ k.mT * (width / self.heads) ** -0.5, dim=-1)
        x = x + self.out((p @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width: int, heads: int, depth: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of tokens [batch, length]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--words", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--infer", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Transformer(options.width, options.heads, options.depth, options.words)
    model.to(options.device)
    run = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(options.steps):
        shape = (options.batch, options.length + 1)
        tokens = torch.randint(options.words, shape, device=options.device)
        if options.infer:
            with torch.inference_mode():
                run(tokens[:, :-1])
            continue
        optimizer.zero_grad()
        logits = run(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
